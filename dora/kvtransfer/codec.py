"""A snapshot as bytes: a head that says what it is, and a body of KV blocks.

The head is self-describing and sealed. All integers little-endian:

    0   8   magic  "DORA-KV\\0"
    8   4   schema
    12  4   reserved, zero
    16  32  BLAKE3 of everything else: bytes 0..16, then 48..
    48      manifest: msgpack map; token ids as int32, logprobs as float64, raw

The body is a row of *rounds*, each of them some blocks: those of the first layer, then of the second, in the layout's
order. A copy of a frozen request has one round; one that began while the request still decoded has its full blocks in
the first rounds and the rest in the last. Layers with a window have blocks in the last round alone: those which are
still read. A body travels and is checked in chunks, of which the head knows nothing.

BLAKE3 guards against damage, not against forgery: whoever may write snapshots may write any snapshot.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from struct import Struct
from typing import Any, Final

import msgpack
import numpy as np
from blake3 import blake3

from dora.errors import SnapshotRefused
from dora.kvtransfer.checksum import Buffer
from dora.kvtransfer.layout import block_counts, blocks_for, check_consistent
from dora.kvtransfer.snapshot import SCHEMA, KvLayout, KvSnapshot, Pieces
from dora.types import RequestSpec, SamplingParams

MAGIC: Final = b"DORA-KV\0"
ROUNDS_MOST: Final = 4096
_PREAMBLE: Final = Struct("<8sII")
_HEAD_START: Final = _PREAMBLE.size + 32


def head_of(snapshot: KvSnapshot, rounds: Sequence[int] = ()) -> bytes:
    """What is to be known of a snapshot beside its blocks. ``rounds``: blocks in each round of the body; none: one.

    Raises SnapshotRefused where its parts contradict each other.
    """
    check_consistent(snapshot)
    count = blocks_for(snapshot.kv_tokens, snapshot.layout.block_tokens)
    manifest = msgpack.packb(_manifest(snapshot, tuple(rounds) or (count,)))
    preamble = _PREAMBLE.pack(MAGIC, SCHEMA, 0)
    return preamble + blake3(preamble).update(manifest).digest() + manifest


def round_of(snapshot: KvSnapshot, first: int = 0, end: int | None = None) -> list[memoryview]:
    """The blocks ``first`` to ``end`` of each layer as buffers in a row; nothing is copied.

    With the request's last block come all blocks of the layers that have a window.
    """
    count = blocks_for(snapshot.kv_tokens, snapshot.layout.block_tokens)
    end = count if end is None else end
    return _parts(snapshot.layout, snapshot.blocks, first, end, is_last=end == count)


def parts_of(layout: KvLayout, blocks: Mapping[str, Pieces], first: int, end: int) -> list[memoryview]:
    """The same of any blocks that a request will not be without: of layers with a window there are none."""
    return _parts(layout, blocks, first, end, is_last=False)


def _parts(layout: KvLayout, blocks: Mapping[str, Pieces], first: int, end: int, *, is_last: bool) -> list[memoryview]:
    parts: list[memoryview] = []
    windowed = layout.windowed
    for name, _ in layout.layers:
        before = 0
        for piece in blocks[name]:
            if name in windowed:
                shown = piece if is_last else piece[:0]
            else:
                shown = piece[max(0, first - before) : max(0, end - before)]
            if len(shown):
                parts.append(shown.reshape(-1).data)
            before += len(piece)
    return parts


def snapshot_of(head: Buffer, *bodies: Buffer | np.ndarray, ahead_bytes: int = 0) -> KvSnapshot:
    """The snapshot of a head and a body whose chunks were checked, in one or more pieces of whole rounds.

    Its arrays are views of ``bodies``. ``ahead_bytes``: of the first rounds, which are not among them.

    Raises SnapshotRefused, naming the field, where the head is truncated, damaged or of another schema, or where it
    does not fit the body or contradicts itself.
    """
    manifest = _unsealed(memoryview(head).cast("B"))
    raw = [body if isinstance(body, np.ndarray) else np.frombuffer(body, np.uint8) for body in bodies]
    try:
        snapshot = _snapshot(msgpack.unpackb(manifest), raw, ahead_bytes)
    except (KeyError, TypeError, ValueError) as error:
        raise SnapshotRefused(f"head: {error!r}") from error
    check_consistent(snapshot)
    return snapshot


def _unsealed(view: memoryview) -> memoryview:
    """The manifest of a head, whose seal is checked."""
    if view.nbytes <= _HEAD_START:
        raise SnapshotRefused(f"head bytes = {view.nbytes}, a head has more than {_HEAD_START}")
    magic, schema, _ = _PREAMBLE.unpack_from(view)
    if magic != MAGIC:
        raise SnapshotRefused(f"magic = {magic!r}, a snapshot begins with {MAGIC!r}")
    if schema != SCHEMA:
        raise SnapshotRefused(f"schema = {schema}, this build reads {SCHEMA}")
    if blake3(view[: _PREAMBLE.size]).update(view[_HEAD_START:]).digest() != view[_PREAMBLE.size : _HEAD_START]:
        raise SnapshotRefused("checksum: the head's bytes are not those that were written")
    return view[_HEAD_START:]


def _manifest(snapshot: KvSnapshot, rounds: Sequence[int]) -> dict[str, Any]:
    request = snapshot.request
    return {
        "layout": asdict(snapshot.layout),
        "kv_tokens": snapshot.kv_tokens,
        "rng_draws": snapshot.rng_draws,
        "rounds": rounds,
        "request_id": request.request_id,
        "version": request.version,
        "prompt_token_ids": np.asarray(request.prompt_token_ids, "<i4").tobytes(),
        "output_token_ids": np.asarray(request.output_token_ids, "<i4").tobytes(),
        "logprobs": np.asarray(request.logprobs, "<f8").tobytes(),
        "sampling": asdict(request.sampling),
    }


def _snapshot(manifest: dict[str, Any], bodies: list[np.ndarray], ahead_bytes: int) -> KvSnapshot:
    layout_fields = dict(manifest["layout"])
    layout_fields["layers"] = tuple((str(name), int(block_bytes)) for name, block_bytes in layout_fields["layers"])
    layout_fields["shards"] = int(layout_fields["shards"])
    layout_fields["windows"] = tuple(int(window) for window in layout_fields["windows"])
    layout_fields["interiors"] = tuple(
        (int(times), tuple((int(outer), int(inner)) for outer, inner in strips))
        for times, strips in layout_fields["interiors"]
    )
    layout = KvLayout(**layout_fields)
    if len(layout.windows) not in (0, len(layout.layers)) or any(size < 0 or size == 1 for size in layout.windows):
        raise ValueError(f"windows = {layout.windows[:8]} of {len(layout.layers)} layers")
    if layout.block_tokens < 1 or min((size for _, size in layout.layers), default=0) < 1:
        raise ValueError(f"block_tokens = {layout.block_tokens}, layers = {layout.layers[:8]}")
    sampling_fields = dict(manifest["sampling"])
    for name in ("stop", "stop_token_ids"):
        sampling_fields[name] = tuple(sampling_fields[name])
    if set(sampling_fields) != {field.name for field in fields(SamplingParams)}:
        raise ValueError(f"sampling fields {sorted(sampling_fields)}")
    request = RequestSpec(
        request_id=str(manifest["request_id"]),
        version=int(manifest["version"]),
        prompt_token_ids=tuple(np.frombuffer(manifest["prompt_token_ids"], "<i4").tolist()),
        sampling=SamplingParams(**sampling_fields),
        output_token_ids=tuple(np.frombuffer(manifest["output_token_ids"], "<i4").tolist()),
        logprobs=tuple(np.frombuffer(manifest["logprobs"], "<f8").tolist()),
    )
    rounds = [int(count) for count in manifest["rounds"]]
    kv_tokens = int(manifest["kv_tokens"])
    counts = _counts(layout, kv_tokens, rounds)
    ahead = _ahead(layout, counts, ahead_bytes)
    blocks = _pieces(layout, counts[ahead:], bodies)
    return KvSnapshot(layout, request, kv_tokens, int(manifest["rng_draws"]), blocks, sum(rounds[:ahead]))


def _counts(layout: KvLayout, kv_tokens: int, rounds: Sequence[int]) -> list[list[int]]:
    """How many blocks each layer has in each round."""
    if not 0 < len(rounds) <= ROUNDS_MOST or min(rounds) < 1:
        raise ValueError(f"rounds = {rounds[:8]}")
    return [
        block_counts(layout, kv_tokens, count, is_last=number == len(rounds)) for number, count in enumerate(rounds, 1)
    ]


def _bytes_of(layout: KvLayout, counts: Sequence[int]) -> int:
    """Of one round."""
    return sum(count * size for count, (_, size) in zip(counts, layout.layers, strict=True))


def _ahead(layout: KvLayout, counts: Sequence[Sequence[int]], ahead_bytes: int) -> int:
    """How many of the first rounds make up ``ahead_bytes``."""
    first = 0
    while ahead_bytes > 0 and first < len(counts):
        ahead_bytes -= _bytes_of(layout, counts[first])
        first += 1
    if ahead_bytes or first == len(counts):
        raise SnapshotRefused(f"rounds = {len(counts)}: those that came ahead end within one, or are all of them")
    return first


def _pieces(layout: KvLayout, counts: Sequence[Sequence[int]], bodies: list[np.ndarray]) -> dict[str, list[np.ndarray]]:
    round_bytes = [_bytes_of(layout, each) for each in counts]
    found_bytes = sum(body.nbytes for body in bodies)
    if sum(round_bytes) != found_bytes or min(map(min, counts)) < 0:
        raise SnapshotRefused(f"body bytes = {found_bytes}, the head makes it {sum(round_bytes)}")
    blocks: dict[str, list[np.ndarray]] = {name: [] for name, _ in layout.layers}
    rest = iter(bodies)
    body, start = next(rest), 0
    for each, whole_bytes in zip(counts, round_bytes, strict=True):
        if start == body.nbytes:
            body, start = next(rest), 0
        if start + whole_bytes > body.nbytes:
            raise SnapshotRefused(f"rounds = {len(counts)}: the bodies end within one")
        for (name, block_bytes), count in zip(layout.layers, each, strict=True):
            if count:
                blocks[name].append(body[start : start + count * block_bytes].reshape(count, block_bytes))
                start += count * block_bytes
    return blocks
