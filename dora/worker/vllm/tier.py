"""Finds KV of vLLM's requests in the shared tier, and stores theirs there.

The tier is asked for a request that is about to get a slot, from the end of its engine's own prefix cache. Other
requests are scheduled meanwhile. The scheduler learns of a hit only once its bytes are in this process, so later
changes of the tier cannot affect the request. Chunks are stored as soon as they are full: a request whose worker dies
has all but its last tokens there.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from dora.data.types import TierLoad
from dora.errors import TransferFailed
from dora.kvtier.chunks import ChunkChain, ChunkShape
from dora.kvtier.tier import Passage, Search, Tier
from dora.kvtransfer.snapshot import Pieces
from dora.worker.reservation import KvBlocks

TIER_BYTES: Final = 256 << 20  # on the way to the tier, and again on the way back
KEEP_STEP_BYTES: Final = 32 << 20  # copied between two steps: some milliseconds
SEARCH_S: Final = 2.0  # a request waits no longer for the tier
KNOWN_MAX: Final = 1 << 16  # digests of chunks that are in the tier; all are forgotten when there are more


@dataclass(slots=True)
class _Request:
    session: str  # its name at the server, which expects that the tokens of a session only grow
    version: int
    chain: ChunkChain
    kept: int = 0  # chunks from its beginning that were given to the tier, or were there
    search: Search | None = None
    until_s: float = 0.0


class TierPrefixes:
    """Connects vLLM's scheduler with the tier, in the engine's thread."""

    def __init__(self, tier: Tier, shape: ChunkShape, store: KvBlocks, scheduler: Any) -> None:
        self._tier = tier
        self._shape = shape
        self._store = store
        self._scheduler = scheduler
        self._requests: dict[str, _Request] = {}
        self._known: set[bytes] = set()
        self._cuts = 0
        self._opened = 0
        self._found_tokens = 0

    @property
    def tier(self) -> Tier:
        return self._tier

    @property
    def load(self) -> TierLoad:
        return replace(self._tier.load, found_tokens=self._found_tokens)

    def begin(self, engine_id: str, version: int) -> None:
        """Enters a request with its version. Only entered requests use the tier."""
        self._requests[engine_id] = _Request(engine_id, version, ChunkChain(self._shape, version))

    def cut(self, engine_id: str) -> None:
        """Notes that a request has dropped its last tokens, and continues with others."""
        version = self._requests[engine_id].version
        self.forget(engine_id)
        self.begin(engine_id, version)
        self._cuts += 1
        self._requests[engine_id].session = f"{engine_id}/{self._cuts}"

    def forget(self, engine_id: str) -> None:
        request = self._requests.pop(engine_id, None)
        if request is not None:
            _give_up(request)
            self._tier.end(request.session)

    def close(self) -> None:
        self._tier.close()

    def found_tokens(self, state: Any, computed_tokens: int) -> int | None:
        """Returns the tokens to take from the tier beyond the engine's own, or None if that is not known yet.

        At least one token is left to compute. Waits for the answer if no decoding request would be delayed.
        """
        request = self._requests.get(state.request_id)
        chunk_tokens = self._shape.chunk_tokens
        end, first = 0 if request is None else (state.num_tokens - 1) // chunk_tokens, computed_tokens // chunk_tokens
        if request is None or end <= first:
            return 0
        if request.search is None:
            passage = self._passage(state, request, end)
            request.search, request.until_s = self._tier.search(passage, first), time.monotonic() + SEARCH_S
        search = request.search
        left_s = max(0.0, request.until_s - time.monotonic())
        if not search.done.is_set() and left_s:
            if self._scheduler.running:
                return None
            search.done.wait(left_s)
        if search.done.is_set() and search.held is not None:
            self._known.difference_update(search.passage.digests[search.held :])
        if not search.done.is_set() or computed_tokens < search.first * chunk_tokens:
            _give_up(request)
            return 0
        return max(0, search.end * chunk_tokens - computed_tokens)

    def take(self, engine_id: str, tokens: int) -> tuple[int, Mapping[str, Pieces]]:
        """Takes ``tokens`` tokens from the tier for a request with a slot. Returns the first block and the blocks."""
        request = self._requests.get(engine_id)
        search = None if request is None else request.search
        if request is None or search is None:
            return 0, {}
        request.search = None
        if not tokens or search.chunks is None:
            return 0, {}
        self._found_tokens += tokens
        request.kept = max(request.kept, search.end)
        self._known.update(search.passage.digests[: search.end])
        begin, end = search.first * self._shape.blocks, search.end * self._shape.blocks
        first = end - tokens // self._shape.block_tokens
        return first, self._shape.show(search.chunks, first - begin, end - begin)

    def keep_new(self) -> None:
        """Stores newly full chunks in the tier. Those that do not fit now are tried again after a step."""
        if not self._tier.up.is_set():
            return
        if self._opened != self._tier.opened:  # another server, which may have nothing
            self._opened = self._tier.opened
            self._known.clear()
            for request in self._requests.values():
                request.kept = 0
        left = max(1, KEEP_STEP_BYTES // self._shape.sealed_bytes)
        for engine_id, request in self._requests.items():
            state = self._scheduler.requests.get(engine_id)
            if state is not None and left > 0:
                left -= self._keep(state, request, left)

    def _keep(self, state: Any, request: _Request, most: int) -> int:
        full = state.num_computed_tokens // self._shape.chunk_tokens
        if full <= request.kept:
            return 0
        digests = request.chain.digests(state.all_token_ids, full)
        while request.kept < full and digests[request.kept] in self._known:
            request.kept += 1
        first, end = request.kept, min(full, request.kept + most)
        room = self._tier.room(end - first) if end > first else None
        if room is None:
            return 0
        block_ids = self._scheduler.kv_cache_manager.get_block_ids(state.request_id)[0]
        blocks = block_ids[first * self._shape.blocks : end * self._shape.blocks]
        try:
            shown = self._store.show([blocks])  # an engine with a tier has one group
        except TransferFailed:  # no pinned memory is free: they are kept after a later step
            return 0
        self._shape.write(shown, room)
        self._tier.keep(self._passage(state, request, end), first, room)
        request.kept = end
        if len(self._known) > KNOWN_MAX:
            self._known.clear()
        self._known.update(digests[first:end])
        return end - first

    def _passage(self, state: Any, request: _Request, end: int) -> Passage:
        tokens = state.all_token_ids[: end * self._shape.chunk_tokens]
        return Passage(request.session, request.version, tokens, request.chain.digests(tokens, end))


def _give_up(request: _Request) -> None:
    if request.search is not None:
        request.search.cancelled = True
        request.search.chunks = None
