"""Checkpoints of the state of sessions, from which a fork continues: a layer's state cannot be cut as its KV can.

One is made when a turn ends, and whenever a session has so many new tokens. They are copies in host memory, the oldest
of which are dropped when they need too much of it. They do not move with their session.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from dora.kvtransfer.snapshot import STATE
from dora.worker.reservation import KvStore

EVERY_TOKENS: Final = 1024


class Checkpoints:
    def __init__(self, store: KvStore, groups: Sequence[Any], most_bytes: int) -> None:
        self._store, self._groups = store, groups
        self._most_bytes = most_bytes
        self.every_tokens = EVERY_TOKENS
        self._kept: dict[tuple[str, int], dict[str, list[np.ndarray]]] = {}  # by request and tokens, the oldest first
        self._last: dict[str, int] = {}  # by request: the tokens of its last one
        self._state_bytes = 0
        self.dropped = 0

    @property
    def held_bytes(self) -> int:
        return len(self._kept) * self._state_bytes

    def is_due(self, request_id: str, tokens: int, *, at_end: bool) -> bool:
        """Returns whether the state of a request's first ``tokens`` tokens is to be kept. ``at_end``: of a turn."""
        if not tokens or (request_id, tokens) in self._kept:
            return False
        return at_end or tokens - self._last.get(request_id, 0) >= self.every_tokens

    def note(self, request_id: str, tokens: int, block_ids: Sequence[Sequence[int]]) -> None:
        """Copies the state that was made of a request's first ``tokens`` tokens, if there is room."""
        self._last[request_id] = tokens
        shown = self._store.show(self._chosen(tokens, block_ids))
        state = {name: [piece.copy() for piece in pieces] for name, pieces in shown.items()}
        self._state_bytes = sum(piece.nbytes for pieces in state.values() for piece in pieces)
        self._kept[request_id, tokens] = state
        while self.held_bytes > self._most_bytes:
            del self._kept[next(iter(self._kept))]
            self.dropped += 1

    def nearest(self, request_id: str, tokens: int) -> int:
        """Returns the tokens of a request's latest checkpoint of at most ``tokens`` tokens; 0: there is none."""
        return max((at for name, at in self._kept if name == request_id and at <= tokens), default=0)

    def restore(self, request_id: str, tokens: int, block_ids: Sequence[Sequence[int]]) -> None:
        """Writes a checkpoint back, and drops the request's later ones."""
        self._store.write(self._chosen(tokens, block_ids), self._kept[request_id, tokens])
        self._drop(request_id, after=tokens)
        self._last[request_id] = tokens

    def forget(self, request_id: str) -> None:
        self._drop(request_id)
        self._last.pop(request_id, None)

    def _drop(self, request_id: str, after: int = 0) -> None:
        for name, tokens in [*self._kept]:
            if name == request_id and tokens > after:
                del self._kept[name, tokens]

    def _chosen(self, tokens: int, block_ids: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """Returns the blocks that hold the state, and none of layers that have KV."""
        return [
            group.kept(ids, tokens) if group.window_tokens == STATE else ()
            for group, ids in zip(self._groups, block_ids, strict=True)
        ]
