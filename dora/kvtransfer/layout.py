"""Does a snapshot fit an engine? Each refusal names the one field that differs and both values."""

from dataclasses import fields
from typing import Final

import numpy as np

from dora.errors import LayoutMisfit, SnapshotRefused
from dora.kvtransfer.reslice import resharded
from dora.kvtransfer.snapshot import KvLayout, KvSnapshot

BLOCK_TOKENS_MAX: Final = 1024  # of another engine, whose blocks are to fit this one's


def blocks_for(tokens: int, block_tokens: int) -> int:
    """How many blocks hold ``tokens`` tokens."""
    return -(-tokens // block_tokens)


def first_block(kv_tokens: int, block_tokens: int, window_tokens: int) -> int:
    """The first block that a layer reads for the token after ``kv_tokens`` tokens; ``window_tokens`` 0: it reads all.

    With the next token itself a window covers ``window_tokens`` tokens (vLLM's ``SlidingWindowManager``).
    """
    return max(0, kv_tokens + 1 - window_tokens) // block_tokens if window_tokens else 0


def block_counts(layout: KvLayout, kv_tokens: int, blocks: int, is_last: bool = True) -> list[int]:
    """How many blocks each layer has in a round of ``blocks`` blocks: those with a window come in the last, alone."""
    windowed, end = layout.windowed, blocks_for(kv_tokens, layout.block_tokens)
    in_window = {name: end - first_block(kv_tokens, layout.block_tokens, size) for name, size in windowed.items()}
    return [in_window[name] * is_last if name in windowed else blocks for name, _ in layout.layers]


def body_bytes_most(layout: KvLayout, tokens: int) -> int:
    """The most that a snapshot of ``tokens`` tokens may weigh, in blocks of this size or of another that fits it."""
    spare_tokens = BLOCK_TOKENS_MAX if _of_interiors(layout) else 0
    return blocks_for(tokens + spare_tokens, layout.block_tokens) * layout.block_bytes


def rng_draws(outputs: int, temperature: float) -> int:
    """Draws that a request has taken from its random stream: one a sampled token, none when greedy."""
    return outputs if temperature > 0 else 0


def check_snapshot(snapshot: KvSnapshot, layout: KvLayout, loaded: int | None) -> None:
    """What every engine asks of a snapshot before it takes it in. Raises SnapshotRefused for the first misfit.

    It may be in other shards and in blocks of another size, where ``reblock.reblocked`` can make this engine's of them.
    """
    check_version(snapshot.request.version, loaded)
    check_layout(snapshot.layout, layout)
    check_consistent(snapshot)


def check_layout(found: KvLayout, expected: KvLayout) -> None:
    """Raises LayoutMisfit for the first field that differs, and that nothing can convert exactly."""
    resized = False
    for field in fields(KvLayout):
        if field.name == "block_tokens":  # what follows can be converted, and says what of
            found = resharded(found, expected.shards)
            resized = _is_resized(found, expected)
        theirs, ours = getattr(found, field.name), getattr(expected, field.name)
        if theirs != ours and not (resized and field.name in ("block_tokens", "layers")):
            raise LayoutMisfit(f"layout.{field.name} = {_short(theirs)}, this engine has {_short(ours)}")


def _is_resized(found: KvLayout, expected: KvLayout) -> bool:
    """Whether two layouts differ in the size of a block alone, and it is known what their blocks are made of."""
    return (
        found.interiors == expected.interiors
        and found.block_tokens <= BLOCK_TOKENS_MAX
        and _of_interiors(found)
        and _of_interiors(expected)
        and [name for name, _ in found.layers] == [name for name, _ in expected.layers]
    )


def _of_interiors(layout: KvLayout) -> bool:
    """Whether the blocks of all layers are what the layout says that they are made of, to the byte."""
    made = [times * sum(outer * inner for outer, inner in strips) for times, strips in layout.interiors]
    return bool(made) and [size for _, size in layout.layers] == [layout.block_tokens * token for token in made]


def check_version(found: int, loaded: int | None) -> None:
    """Raises SnapshotRefused unless the snapshot is of the version that is loaded."""
    if found != loaded:
        raise SnapshotRefused(f"request.version = {found}, this engine has loaded {loaded}")


def check_consistent(snapshot: KvSnapshot) -> None:
    """Raises SnapshotRefused where the parts of a snapshot contradict each other."""
    request, layout = snapshot.request, snapshot.layout
    outputs = len(request.output_token_ids)
    if outputs == 0 or not request.prompt_token_ids:
        raise SnapshotRefused("request: a snapshot is of a request with a prompt and at least one output token")
    if len(request.logprobs) != outputs:
        raise SnapshotRefused(f"request.logprobs: {len(request.logprobs)} for {outputs} output tokens")
    kv_tokens = len(request.prompt_token_ids) + outputs - 1
    if snapshot.kv_tokens != kv_tokens:
        raise SnapshotRefused(f"kv_tokens = {snapshot.kv_tokens}, its tokens make it {kv_tokens}")
    draws = rng_draws(outputs, request.sampling.temperature)
    if snapshot.rng_draws != draws:
        raise SnapshotRefused(f"rng_draws = {snapshot.rng_draws}, its tokens make it {draws}")
    names = tuple(name for name, _ in layout.layers)
    if set(snapshot.blocks) != set(names):
        raise SnapshotRefused(f"blocks: layers {_short(sorted(snapshot.blocks))}, the layout has {_short(names)}")
    count = blocks_for(kv_tokens, layout.block_tokens)
    if not 0 <= snapshot.ahead < count:
        raise SnapshotRefused(f"ahead = {snapshot.ahead}, of {count} blocks: the last never is")
    counts = block_counts(layout, kv_tokens, count - snapshot.ahead)
    for (name, block_bytes), count in zip(layout.layers, counts, strict=True):
        pieces = snapshot.blocks[name]
        wrong = [piece for piece in pieces if piece.dtype != np.uint8 or piece.shape[1:] != (block_bytes,)]
        found = sum(len(piece) for piece in pieces)
        if wrong or found != count:
            shown = [(str(piece.dtype), piece.shape) for piece in pieces]
            raise SnapshotRefused(f"blocks.{name}: {_short(shown)}, not uint8 {(count, block_bytes)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
