"""Checks whether a snapshot fits an engine. Each refusal names the one field that differs, with both values."""

import operator
from dataclasses import fields
from typing import Final

import numpy as np

from dora.errors import LayoutMisfit, SnapshotRefused
from dora.kvtransfer.reslice import resharded
from dora.kvtransfer.snapshot import STATE, KvLayout, KvSnapshot

BLOCK_TOKENS_MAX: Final = 1024  # limit for another engine's blocks, which this engine must convert


def blocks_for(tokens: int, block_tokens: int) -> int:
    return -(-tokens // block_tokens)


def first_block(kv_tokens: int, block_tokens: int, window_tokens: int) -> int:
    """The first block that a layer reads for the token after ``kv_tokens`` tokens. Without a window it reads all.

    A window of ``window_tokens`` tokens includes the next token itself (vLLM's ``SlidingWindowManager``). A state
    (``STATE``) lies in the block of the last token. If ``window_tokens`` is below that, the layer reads a chunk of
    ``-window_tokens`` tokens, from its beginning (``ChunkedLocalAttentionManager``).
    """
    if window_tokens < STATE:
        return kv_tokens // -window_tokens * -window_tokens // block_tokens
    if window_tokens == STATE:
        return blocks_for(kv_tokens, block_tokens) - 1
    return max(0, kv_tokens + 1 - window_tokens) // block_tokens if window_tokens else 0


def block_counts(layout: KvLayout, kv_tokens: int, blocks: int, is_last: bool = True) -> list[int]:
    """The blocks of each layer in a round of ``blocks`` blocks. Layers with a window or state are in the last alone."""
    windowed, end = layout.windowed, blocks_for(kv_tokens, layout.block_tokens)
    in_window = {name: end - first_block(kv_tokens, layout.block_tokens, size) for name, size in windowed.items()}
    return [in_window[name] * is_last if name in windowed else blocks for name, _ in layout.layers]


def body_bytes_most(layout: KvLayout, tokens: int) -> int:
    """The maximum size of a snapshot of ``tokens`` tokens, in this engine's blocks or in others that fit it."""
    spare_tokens = BLOCK_TOKENS_MAX if _of_interiors(layout) else 0
    return blocks_for(tokens + spare_tokens, layout.block_tokens) * layout.block_bytes + layout.state_bytes


def rng_draws(outputs: int, temperature: float) -> int:
    """The position in a request's random stream: one draw per output, given ones included, or 0 if greedy."""
    return outputs if temperature > 0 else 0


def check_snapshot(snapshot: KvSnapshot, layout: KvLayout, loaded: int | None) -> None:
    """The checks of every engine before it accepts a snapshot. Raises SnapshotRefused for the first mismatch.

    Other shards and block sizes are allowed if ``reblock.reblocked`` can convert them.
    """
    check_version(snapshot.request.version, loaded)
    check_layout(snapshot.layout, layout)
    check_consistent(snapshot)


def check_layout(found: KvLayout, expected: KvLayout) -> None:
    """Raises LayoutMisfit for the first field that differs and cannot be converted exactly."""
    resized = False
    for field in fields(KvLayout):
        if field.name == "block_tokens":  # the remaining fields can be converted
            found = resharded(found, expected.shards)
            resized = _is_resized(found, expected)
        theirs, ours = getattr(found, field.name), getattr(expected, field.name)
        if theirs != ours and not (resized and field.name in ("block_tokens", "layers")):
            name, said = f"layout.{field.name}", f"{_short(theirs)}, this engine has {_short(ours)}"
            raise LayoutMisfit(f"{name} = {said}", name, theirs)


def _is_resized(found: KvLayout, expected: KvLayout) -> bool:
    """Returns whether two layouts differ only in the block size, and the interiors of their blocks are known."""
    return (
        found.interiors == expected.interiors
        and found.block_tokens <= BLOCK_TOKENS_MAX
        and _of_interiors(found)
        and _of_interiors(expected)
        and [name for name, _ in found.layers] == [name for name, _ in expected.layers]
    )


def _of_interiors(layout: KvLayout) -> bool:
    """Returns whether the interiors account for every byte of the blocks of all layers."""
    made = [times * sum(outer * inner for outer, inner in strips) for times, strips in layout.interiors]
    windows = layout.windows or (0,) * len(layout.layers)
    times = [1 if window == STATE else layout.block_tokens for window in windows]
    return bool(made) and [size for _, size in layout.layers] == [*map(operator.mul, times, made)]


def check_version(found: int, loaded: int | None) -> None:
    """Raises SnapshotRefused unless the snapshot is of the loaded version."""
    if found != loaded:
        raise SnapshotRefused(f"request.version = {found}, this engine has loaded {loaded}", "request.version", found)


def check_consistent(snapshot: KvSnapshot) -> None:
    """Raises SnapshotRefused if the parts of a snapshot contradict each other."""
    request, layout = snapshot.request, snapshot.layout
    outputs = len(request.output_token_ids)
    if outputs == 0 or not request.prompt_token_ids:
        raise SnapshotRefused("request: a snapshot needs a prompt and at least one output token", "request")
    if len(request.logprobs) != outputs:
        said = f"{len(request.logprobs)} for {outputs} output tokens"
        raise SnapshotRefused(f"request.logprobs: {said}", "request.logprobs", len(request.logprobs))
    kv_tokens = len(request.prompt_token_ids) + outputs - 1 - request.pending
    if kv_tokens < len(request.prompt_token_ids):
        raise SnapshotRefused("request.given: a snapshot needs a sampled token before given ones", "request.given")
    if snapshot.kv_tokens != kv_tokens:
        said = f"kv_tokens = {snapshot.kv_tokens}: its tokens require {kv_tokens}"
        raise SnapshotRefused(said, "kv_tokens", snapshot.kv_tokens)
    state_tokens = kv_tokens if layout.state_bytes else 0
    if snapshot.state_tokens != state_tokens:
        said = f"state_tokens = {snapshot.state_tokens}: its blocks are those of {state_tokens}"
        raise SnapshotRefused(said, "state_tokens", snapshot.state_tokens)
    draws = rng_draws(outputs, request.sampling.temperature)
    if snapshot.rng_draws != draws:
        said = f"rng_draws = {snapshot.rng_draws}: its tokens require {draws}"
        raise SnapshotRefused(said, "rng_draws", snapshot.rng_draws)
    names = tuple(name for name, _ in layout.layers)
    if set(snapshot.blocks) != set(names):
        held = sorted(snapshot.blocks)
        raise SnapshotRefused(f"blocks: layers {_short(held)}, the layout has {_short(names)}", "blocks", held)
    count = blocks_for(kv_tokens, layout.block_tokens)
    if not 0 <= snapshot.ahead < count:
        said = f"ahead = {snapshot.ahead} of {count} blocks: the last block cannot be ahead"
        raise SnapshotRefused(said, "ahead", snapshot.ahead)
    counts = block_counts(layout, kv_tokens, count - snapshot.ahead)
    for (name, block_bytes), count in zip(layout.layers, counts, strict=True):
        pieces = snapshot.blocks[name]
        wrong = [piece for piece in pieces if piece.dtype != np.uint8 or piece.shape[1:] != (block_bytes,)]
        found = sum(len(piece) for piece in pieces)
        if wrong or found != count:
            shown = [(str(piece.dtype), piece.shape) for piece in pieces]
            said = f"blocks.{name}: {_short(shown)}, not uint8 {(count, block_bytes)}"
            raise SnapshotRefused(said, f"blocks.{name}", shown)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
