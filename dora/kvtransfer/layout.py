"""Does a snapshot fit an engine? Each refusal names the one field that differs and both values."""

from dataclasses import fields

import numpy as np

from dora.errors import SnapshotRefused
from dora.kvtransfer.reslice import resharded
from dora.kvtransfer.snapshot import KvLayout, KvSnapshot


def blocks_for(tokens: int, block_tokens: int) -> int:
    """How many blocks hold ``tokens`` tokens."""
    return -(-tokens // block_tokens)


def rng_draws(outputs: int, temperature: float) -> int:
    """Draws that a request has taken from its random stream: one a sampled token, none when greedy."""
    return outputs if temperature > 0 else 0


def check_snapshot(snapshot: KvSnapshot, layout: KvLayout, loaded: int | None) -> None:
    """What every engine asks of a snapshot before it takes it in. Raises SnapshotRefused for the first misfit."""
    check_version(snapshot.request.version, loaded)
    check_layout(snapshot.layout, layout)
    if snapshot.ahead and snapshot.layout != layout:
        raise SnapshotRefused(f"ahead = {snapshot.ahead}: blocks of another layout are not written before it is known")
    check_consistent(snapshot)


def check_layout(found: KvLayout, expected: KvLayout) -> None:
    """Raises SnapshotRefused for the first field that differs, and that ``reslice`` cannot make alike."""
    for field in fields(KvLayout):
        if field.name == "layers":  # all that says what it is comes before
            found = resharded(found, expected.shards)
        theirs, ours = getattr(found, field.name), getattr(expected, field.name)
        if theirs != ours:
            raise SnapshotRefused(f"layout.{field.name} = {_short(theirs)}, this engine has {_short(ours)}")


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
    count = blocks_for(kv_tokens, layout.block_tokens) - snapshot.ahead
    if snapshot.ahead < 0 or count < 1:
        raise SnapshotRefused(f"ahead = {snapshot.ahead}, of {count + snapshot.ahead} blocks: the last never is")
    for name, block_bytes in layout.layers:
        pieces = snapshot.blocks[name]
        wrong = [piece for piece in pieces if piece.dtype != np.uint8 or piece.shape[1:] != (block_bytes,)]
        found = sum(len(piece) for piece in pieces)
        if wrong or found != count:
            shown = [(str(piece.dtype), piece.shape) for piece in pieces]
            raise SnapshotRefused(f"blocks.{name}: {_short(shown)}, not uint8 {(count, block_bytes)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
