"""A request's rounds out of an engine: full blocks while it decodes, and the rest once it is frozen.

    decodes  ─ round ─ round ─ ... ─ freeze ─ last round: the remaining blocks and the request's state ─▶ complete

A round has the blocks that became full since the previous one. The engine's thread copies nothing: it hands out blocks
that no longer change, and the data plane reads them beside the steps. Rounds end when little is left, when the rest
does not shrink, or after ``ROUNDS_MAX``; only the rest is copied while the request is frozen. A round that is larger
than a part (``DataPlane.part_bytes``) travels in parts, each a round to the target. The first round carries the opening
of the snapshot's head with the tokens so far, which lets the target prepare early, so the last round is small for any
length.

Blocks that another request brought to this target do not travel again: the first round names them. If the target no
longer has them, the copy restarts with all of them.
"""

from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import Final

from dora.data.types import RequestSpec
from dora.errors import Conflict, DoraError
from dora.kvtransfer.codec import Opening, closing_of, opening_of, parts_of, round_of
from dora.kvtransfer.copying import NotMovable, Round
from dora.kvtransfer.layout import blocks_for
from dora.kvtransfer.peer import Peer
from dora.kvtransfer.snapshot import NO_PREFIX, FullBlocks, SegmentId
from dora.kvtransfer.transfer import Sent
from dora.worker.engine import RolloutEngine
from dora.worker.prefixes import SentPrefixes

ROUNDS_MAX: Final = 8  # while it decodes
LEFT_BLOCKS: Final = 2  # full blocks that are as well copied with the last round


class EngineRounds:
    """The rounds of a request that an engine decodes. Used by the engine's thread between steps."""

    opened: Final = None

    def __init__(self, engine: RolloutEngine, peer: Peer, request_id: str, sent: SentPrefixes, part_bytes: int) -> None:
        self._engine = engine
        self._most = max(1, part_bytes // engine.layout.block_bytes)  # blocks of a part
        self._peer = peer
        self._request_id = request_id
        self._sent = sent
        self._segment: SegmentId = (0, 0)
        self._prefix = NO_PREFIX  # blocks that the target has from another request
        self._may_share = True  # until it is known whether it does
        self._rounds: list[int] = []  # blocks of each part that has arrived, or is on its way
        self._begun = 0
        self._size = self._left = 0  # blocks of the latest round, and those of them that have not left
        self._opens = True  # it is the first one
        self._first: Future[Sent] | None = None  # the first part's arrival, while parts of the first round leave
        self._opening: Opening | None = None  # which the first of these rounds has brought
        self.tokens = -1

    def next_round(self) -> Round | None:
        try:
            if self._may_share and not self._knows_prefix():
                return None
            full = self._engine.full_blocks(self._request_id, self._done, self._most)
        except Conflict as error:
            self._begin_again()
            return self._last(str(error))
        if self._rounds and full.segment != self._segment:  # it was preempted: all copies are void
            self._begin_again()
            full = self._engine.full_blocks(self._request_id, 0, self._most)
        if not self._left:
            found = full.end - self._done
            is_little = found <= LEFT_BLOCKS and (self._rounds or not self._prefix.blocks)
            shrinks = not self._rounds or found < self._size
            if is_little or not shrinks or self._begun >= ROUNDS_MAX:
                if found <= self._most:
                    return self._last()
                self._engine.freeze(self._request_id)  # the rest is one round more
            self._size, self._left, self._opens = found, found, not self._rounds
            self._begun += 1
        return self._part(full)

    def restarts(self) -> bool:
        """Returns whether a copy without a prefix may succeed after the target refused one with it."""
        if not self._prefix.blocks or len(self._rounds) > 1:
            return False
        self._begin_again()
        return True

    def close(self, error: DoraError | None) -> None:
        """Does nothing: the engine keeps the blocks until the request is removed or thawed."""

    @property
    def _done(self) -> int:
        return self._prefix.blocks + sum(self._rounds)

    def _knows_prefix(self) -> bool:
        """Finds the blocks that the target has from another request. Returns False while they are being sent."""
        segment, end = self._engine.final_blocks(self._request_id)
        found = self._sent.find(self._peer, self._request_id, segment)
        if found is not None:
            self._may_share = False
            blocks = min(found.blocks, end - 1)  # the target is asked by a round, which has to bring something
            self._prefix = found._replace(blocks=blocks) if blocks > 0 else NO_PREFIX
        return found is not None

    def _begin_again(self) -> None:
        self._prefix, self._rounds, self._left = NO_PREFIX, [], 0

    def _part(self, full: FullBlocks) -> Round:
        is_first, prefix, count = not self._rounds, self._prefix, min(self._left, self._most)
        self._segment = full.segment
        self._left -= count
        self._rounds.append(count)
        parts = parts_of(self._engine.layout, full.blocks, 0, count)
        head = self._open(self._engine.request(self._request_id)).raw if is_first else b""
        leaves = None
        if self._opens and not prefix.blocks:
            leaves = partial(self._note, self._engine.siblings(self._request_id, sum(self._rounds)))
        prefix = prefix if is_first else NO_PREFIX
        return Round(parts, head, goes_on=True, prefix=prefix, is_first=is_first, leaves=leaves)

    def _note(self, siblings: Mapping[str, tuple[SegmentId, int]], done: "Future[Sent]") -> None:
        self._first = done if len(self._rounds) == 1 else self._first
        assert self._first is not None
        self._sent.note(self._peer, self._first, done, siblings)

    def _last(self, why: str = "it has no token") -> Round:
        """Freezes the request and returns its remaining blocks."""
        self._engine.freeze(self._request_id)
        done, is_first = self._done, not self._rounds
        snapshot = self._engine.export(self._request_id, done)
        if snapshot is None:
            raise NotMovable(f"{self._request_id} cannot move exactly just now: {why}", "request_id", self._request_id)
        self.tokens = len(snapshot.request.output_token_ids)
        left = blocks_for(snapshot.kv_tokens, snapshot.layout.block_tokens) - done
        head = self._open(snapshot.request).raw if is_first else b""
        assert self._opening is not None
        head += closing_of(snapshot, self._opening, [*self._rounds, left])
        return Round(round_of(snapshot, done), head, is_first=is_first)

    def _open(self, request: RequestSpec) -> Opening:
        self._opening = opening_of(self._engine.layout, request, self._prefix.blocks)
        return self._opening
