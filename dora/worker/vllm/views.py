"""Requests of a vLLM engine, and their KV as others may see it: where it is, and whether it can move."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from typing import Any

from dora.data.types import RequestSpec, pending_of
from dora.errors import Conflict
from dora.kvtransfer.layout import rng_draws
from dora.kvtransfer.snapshot import FullBlocks, KvLayout, KvSnapshot, SegmentId
from dora.worker.reservation import KvStore

_entries = count(1)


@dataclass(slots=True)
class EngineRequest:
    """One request in the engine. ``outputs`` and ``logprobs`` hold the whole response so far."""

    request: RequestSpec
    engine_id: str
    entry: int = field(default_factory=_entries.__next__)  # no other request has it, nor this one if it comes again
    outputs: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def kv_tokens(self) -> int:
        """The tokens before the last sampled one, whose KV is computed unless the request waits or is preempted."""
        pending = pending_of(self.request.inputs, len(self.outputs))
        return len(self.request.prompt_token_ids) + len(self.outputs) - 1 - pending

    @property
    def owes_prompt(self) -> bool:
        """Returns whether the request owes prompt logprobs with its present outputs."""
        return self.request.prompt_logprobs and len(self.outputs) == self.request.turn_begin

    def begin_segment(self) -> None:
        """Ends the segment of its blocks: they are about to change."""
        self.entry = next(_entries)

    @property
    def so_far(self) -> RequestSpec:
        return replace(self.request, output_token_ids=tuple(self.outputs), logprobs=tuple(self.logprobs))


class KvViews:
    """Views of the KV of requests, without a copy. ``RolloutEngine`` describes each."""

    def __init__(
        self,
        scheduler: Any,
        store: KvStore,
        layout: KvLayout,
        groups: Sequence[Any],
        why_unmovable: str,
        takes_ahead: bool,
    ) -> None:
        """``groups`` are the layers' (``vllm.groups``). ``takes_ahead`` says whether requests can share blocks."""
        self._scheduler = scheduler
        self._store = store
        self._layout = layout
        self._groups = groups
        self._why_unmovable = why_unmovable
        self._takes_ahead = takes_ahead

    def export(self, live: EngineRequest, first: int) -> KvSnapshot | None:
        if live.engine_id not in self._scheduler.held:
            raise Conflict("request_id", live.request.request_id, "a frozen request", why="is not frozen")
        request, draws = live.so_far, rng_draws(len(live.outputs), live.request.sampling.temperature)
        waiting: KvSnapshot | None = self._scheduler.connector.offered(live.engine_id)
        if waiting is not None:  # taken in and not yet scheduled: it moves on as it came
            shown = self._store.lend([self._scheduler.brought(live.engine_id)] * len(self._groups))
            blocks = {name: [*shown[name], *pieces] for name, pieces in waiting.blocks.items()}
            return replace(waiting, request=request, rng_draws=draws, blocks=blocks, ahead=0)
        kv_tokens = live.kv_tokens
        if self._why_unmovable or not self._decodes(live):
            return None
        ids = zip(self._groups, self._block_ids(live), strict=True)
        return KvSnapshot(
            layout=self._layout,
            request=request,
            kv_tokens=kv_tokens,
            rng_draws=draws,
            blocks=self._store.lend([group.kept(block_ids, kv_tokens, first) for group, block_ids in ids]),
            ahead=first,
            state_tokens=self._state(live).num_computed_tokens if self._layout.state_bytes else 0,
        )

    def final_blocks(self, live: EngineRequest) -> tuple[SegmentId, int]:
        state, kv_tokens = self._state(live), live.kv_tokens
        why = ""
        if self._why_unmovable:
            why = f"has state that does not move: {self._why_unmovable}"
        elif self._scheduler.connector.is_offered(live.engine_id):
            why = "waits for a slot"
        elif not self._decodes(live):
            why = "is preempted" if state.num_preemptions else "waits for a slot, or is in prefill"
        if why:
            raise Conflict("request_id", live.request.request_id, "a request that decodes", why)
        has_some = not all(group.window_tokens for group in self._groups)
        return self._segment(live), (kv_tokens - 1) // self._layout.block_tokens if has_some else 0

    def full_blocks(self, live: EngineRequest, first: int, most: int | None) -> FullBlocks:
        segment, end = self.final_blocks(live)
        end = max(first, end)
        shown = end if most is None else min(end, first + most)
        ids = zip(self._groups, self._block_ids(live), strict=True)
        final = [() if group.window_tokens else block_ids[first:shown] for group, block_ids in ids]
        return FullBlocks(segment, end, self._store.lend(final))

    def siblings(
        self, live: EngineRequest, others: Mapping[str, EngineRequest], blocks: int
    ) -> dict[str, tuple[SegmentId, int]]:
        if not self._takes_ahead:
            return {}
        own = self._block_ids(live)[0][:blocks]
        found = {}
        for name, other in others.items():
            alike = takewhile(lambda pair: pair[0] == pair[1], zip(own, self._block_ids(other)[0], strict=False))
            shared = sum(1 for _ in alike)
            if shared and other is not live:
                found[name] = self._segment(other), shared
        return found

    def _decodes(self, live: EngineRequest) -> bool:
        """Returns whether it has the KV of all tokens before the last sampled one, and owes nothing of the prefill."""
        has_kv = bool(live.outputs) and self._state(live).num_computed_tokens == live.kv_tokens
        return has_kv and not live.owes_prompt

    def _state(self, live: EngineRequest) -> Any:
        return self._scheduler.requests[live.engine_id]

    def _block_ids(self, live: EngineRequest) -> Any:
        return self._scheduler.kv_cache_manager.get_block_ids(live.engine_id)

    def _segment(self, live: EngineRequest) -> SegmentId:
        return live.entry, self._state(live).num_preemptions
