"""Requests of a fake engine, and their KV as blocks."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np

from dora.data.types import RequestSpec, pending_of
from dora.kvtransfer.layout import blocks_for, first_block
from dora.kvtransfer.snapshot import STATE, KvLayout, KvSnapshot
from dora.worker.fake.model import KV_BYTES, LAYERS, FakeModel, Kv
from dora.worker.reservation import Reservation
from dora.worker.stop_strings import StopWatch

_entries = count(1)


@dataclass(slots=True)
class FakeRequest:
    """One request. ``kv`` has one array of bytes for each layer; empty until it has a slot."""

    request: RequestSpec
    length: int  # of the turn, if nothing ends it earlier
    outputs: list[int]
    logprobs: list[float]
    watch: StopWatch | None
    kv: Kv = field(default_factory=Kv)
    entry: int = field(default_factory=_entries.__next__)  # no other request has it, nor this one if it comes again
    snapshot: KvSnapshot | None = None  # taken in and not yet in a slot
    reserved: Reservation | None = None  # has the blocks that arrived before the snapshot
    preemptions: int = 0

    @property
    def token_ids(self) -> list[int]:
        return [*self.request.prompt_token_ids, *self.outputs]

    @property
    def tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.outputs)

    def from_token(self, first: int) -> Sequence[int]:
        """Returns the tokens from ``first`` on, without a copy of a long response."""
        prompt = self.request.prompt_token_ids
        return self.outputs[first - len(prompt) :] if first >= len(prompt) else [*prompt[first:], *self.outputs]

    @property
    def pending(self) -> int:
        """The number of environment tokens after which nothing was sampled yet."""
        return pending_of(self.request.inputs, len(self.outputs))

    @property
    def kv_tokens(self) -> int:
        return len(self.kv[LAYERS[0]]) // KV_BYTES if self.kv else 0

    @property
    def decodes(self) -> bool:
        """Returns whether it has the KV of just the tokens before the last sampled one, and owes no prompt logprobs."""
        expected = len(self.request.prompt_token_ids) + len(self.outputs) - 1 - self.pending
        return bool(self.kv) and self.kv_tokens <= expected and not self.owes_prompt

    @property
    def owes_prompt(self) -> bool:
        """Returns whether the request owes prompt logprobs with its present outputs."""
        return self.request.prompt_logprobs and len(self.outputs) == self.request.turn_begin

    @property
    def so_far(self) -> RequestSpec:
        return replace(self.request, output_token_ids=tuple(self.outputs), logprobs=tuple(self.logprobs))


def bring_kv(layout: KvLayout, model: FakeModel, live: FakeRequest) -> int:
    """Adds the KV of all tokens before the last sampled one: from the snapshot, or computed.

    Returns the tokens that were computed a second time.
    """
    if live.snapshot is not None:
        kv_tokens, blocks = live.snapshot.kv_tokens, with_ahead(live.snapshot, live.reserved)
        for name, pieces in blocks.items():
            is_state = layout.windowed.get(name) == STATE
            before = b"" if is_state else bytes(_first_block(layout, name, kv_tokens) * _block_bytes(layout))
            whole = before + b"".join(piece.tobytes() for piece in pieces)
            live.kv[name] = bytearray(whole[: kv_tokens * KV_BYTES])
        live.snapshot = live.reserved = None
        return 0
    live.kv = Kv(LAYERS)
    known = live.token_ids if not live.outputs else live.token_ids[: -1 - live.pending]
    for token_id in known:
        model.append_kv(live.kv, token_id)
    return len(known) if live.outputs else 0


def cut_kv(layout: KvLayout, live: FakeRequest, after: int) -> bool:
    """Drops the KV of a kept request's outputs from ``after`` on. Returns False, and changes nothing, if the KV before
    them is not there: it is still in the snapshot, a window has left it behind, or a state has gone on.
    """
    kv_tokens = min(live.kv_tokens, len(live.request.prompt_token_ids) + after)
    windows = layout.windowed
    if not kv_tokens or any(
        _first_block(layout, name, kv_tokens) < _first_block(layout, name, live.kv_tokens)
        or (window == STATE and kv_tokens < live.kv_tokens)
        for name, window in windows.items()
    ):
        return False
    live.kv.cut(kv_tokens)
    live.entry = next(_entries)
    return True


def blocks_from(layout: KvLayout, live: FakeRequest, first: int) -> dict[str, list[np.ndarray]]:
    """Returns the blocks from ``first`` on, of a layer with a window those that it still has, or its state."""
    return {
        name: [np.frombuffer(bytes(raw), np.uint8)[None]]
        if layout.windowed.get(name) == STATE
        else [_to_blocks(layout, raw[_first_block(layout, name, live.kv_tokens, first) * _block_bytes(layout) :])]
        for name, raw in live.kv.items()
    }


def full_blocks_of(layout: KvLayout, live: FakeRequest, first: int, end: int) -> dict[str, list[np.ndarray]]:
    """Returns the blocks ``first`` to ``end`` of all layers without a window."""
    size = _block_bytes(layout)
    return {
        name: [] if name in layout.windowed else [_to_blocks(layout, raw[first * size : end * size])]
        for name, raw in live.kv.items()
    }


def with_ahead(snapshot: KvSnapshot, reserved: Reservation | None) -> dict[str, list[np.ndarray]]:
    """Returns all blocks of a snapshot, with those that arrived before it."""
    blocks = {name: [np.asarray(piece) for piece in pieces] for name, pieces in snapshot.blocks.items()}
    if reserved is None:
        return blocks
    shown = reserved.show(snapshot.ahead)
    return {name: [*shown[name], *pieces] for name, pieces in blocks.items()}


def _block_bytes(layout: KvLayout) -> int:
    return layout.block_tokens * KV_BYTES


def _first_block(layout: KvLayout, layer: str, kv_tokens: int, first: int = 0) -> int:
    """Returns the first block that a layer with a window still has; ``first`` for a layer without one."""
    window_tokens = layout.windowed.get(layer)
    return first_block(kv_tokens, layout.block_tokens, window_tokens) if window_tokens else first


def _to_blocks(layout: KvLayout, raw: bytearray) -> np.ndarray:
    size = _block_bytes(layout)
    blocks = np.zeros((blocks_for(len(raw), size), size), np.uint8)
    blocks.reshape(-1)[: len(raw)] = np.frombuffer(raw, np.uint8)
    return blocks
