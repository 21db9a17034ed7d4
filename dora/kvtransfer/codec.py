r"""A snapshot as bytes: a head that describes it, and a body of KV blocks.

The head is self-describing and has two parts, each sealed. All integers are little-endian:

    0   8   magic  "DORA-KV\0"
    8   4   schema
    12  4   manifest bytes
    16  32  BLAKE3 of everything else: bytes 0..16, then 48..
    48      manifest: msgpack map; token ids as int32, logprobs as float64, raw

The *opening* describes the request, with the tokens that it had when the copy began. It may travel with the first
round, so that only the *closing* remains for the end: the tokens since, the present turn with its sampling, and how
the body is cut. The closing contains the seal of its opening.

The body is a sequence of *rounds*, each of some blocks: those of the first layer, then of the second, in the layout's
order. A copy of a frozen request has one round. A copy that began while the request still decoded has its full blocks
in the first rounds and the rest in the last. Layers with a window have blocks in the last round alone: those that are
still read. So have layers that keep a state: their one block. The first blocks of all layers may be omitted: the
*prefix*, which the target has from another request of the same prompt. A body travels and is checked in chunks, which
the head does not describe.

BLAKE3 guards against damage, not against forgery: a writer of snapshots may write any snapshot.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from struct import Struct
from typing import Any, Final

import msgpack
import numpy as np
from blake3 import blake3

from dora.data.types import RequestSpec
from dora.errors import SnapshotRefused
from dora.kvtransfer.checksum import Buffer
from dora.kvtransfer.device import OnDevice, Part
from dora.kvtransfer.layout import block_counts, blocks_for, check_consistent
from dora.kvtransfer.manifest import (
    CLOSING,
    OPENING,
    opened,
    outputs_of,
    read_outputs,
    read_sampling,
    read_turns,
    turns_of,
    unpacked,
)
from dora.kvtransfer.snapshot import SCHEMA, KvLayout, KvSnapshot, Pieces

MAGIC: Final = b"DORA-KV\0"
ROUNDS_MAX: Final = 4096
_PREAMBLE: Final = Struct("<8sII")
_HEAD_START: Final = _PREAMBLE.size + 32


@dataclass(frozen=True, slots=True)
class Opening:
    """The first part of a head: ``raw`` are its bytes; ``request`` has the outputs of the time when the copy began.

    ``prefix`` is the number of first blocks that do not travel with the snapshot, as its target has them.
    """

    raw: bytes
    layout: KvLayout
    request: RequestSpec
    prefix: int = 0


def opening_of(layout: KvLayout, request: RequestSpec, prefix: int = 0) -> Opening:
    """Builds the opening, which is known before the snapshot exists."""
    manifest = {
        "layout": asdict(layout),
        "request_id": request.request_id,
        "version": request.version,
        "prompt_token_ids": np.asarray(request.prompt_token_ids, "<i4").tobytes(),
        "sampling": asdict(request.sampling),
        "prefix": prefix,
        "keeps": request.keeps,
        **turns_of(request),
        **outputs_of(request, 0),
    }
    return Opening(_sealed(manifest), layout, request, prefix)


def closing_of(snapshot: KvSnapshot, opening: Opening, rounds: Sequence[int] = ()) -> bytes:
    """Builds the closing. ``rounds`` has the blocks in each round of the body, and is empty for one round.

    Raises SnapshotRefused if the snapshot's parts contradict each other.
    """
    check_consistent(snapshot)
    count = blocks_for(snapshot.kv_tokens, snapshot.layout.block_tokens)
    manifest = {
        "opening": _seal_of(opening.raw),
        "kv_tokens": snapshot.kv_tokens,
        "rng_draws": snapshot.rng_draws,
        "state_tokens": snapshot.state_tokens,
        "rounds": tuple(rounds) or (count,),
        "sampling": asdict(snapshot.request.sampling),
        **turns_of(snapshot.request),
        **outputs_of(snapshot.request, len(opening.request.output_token_ids)),
    }
    return _sealed(manifest)


def head_of(snapshot: KvSnapshot, rounds: Sequence[int] = ()) -> bytes:
    """Both parts of the head: everything about a snapshot except its blocks."""
    opening = opening_of(snapshot.layout, snapshot.request)
    return opening.raw + closing_of(snapshot, opening, rounds)


def round_of(snapshot: KvSnapshot, first: int = 0, end: int | None = None) -> list[Part]:
    """The blocks ``first`` to ``end`` of each layer as consecutive buffers, without a copy.

    The request's last block is accompanied by all blocks of the layers that have a window or a state. Blocks that were
    sent ahead of the snapshot are not part of it.
    """
    count = blocks_for(snapshot.kv_tokens, snapshot.layout.block_tokens)
    end, ahead = count if end is None else end, snapshot.ahead
    return _parts(snapshot.layout, snapshot.blocks, first - ahead, end - ahead, is_last=end == count)


def parts_of(layout: KvLayout, blocks: Mapping[str, Pieces], first: int, end: int) -> list[Part]:
    """The same of full blocks of a request that still decodes. Layers with a window are not included."""
    return _parts(layout, blocks, first, end, is_last=False)


def _parts(layout: KvLayout, blocks: Mapping[str, Pieces], first: int, end: int, *, is_last: bool) -> list[Part]:
    parts: list[Part] = []
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


def opening_in(head: Buffer) -> Opening:
    """Decodes the opening. Raises SnapshotRefused if it is truncated, damaged or of another schema."""
    view = memoryview(head).cast("B")
    manifest = _unsealed(view)
    layout, request, prefix = opened(unpacked(manifest, OPENING))
    return Opening(bytes(view[: _HEAD_START + manifest.nbytes]), layout, request, prefix)


def snapshot_of(
    head: Buffer, *bodies: Buffer | np.ndarray | OnDevice, ahead_bytes: int = 0, opening: Opening | None = None
) -> KvSnapshot:
    """The snapshot of a head and of a body whose chunks were checked, in one or more pieces of whole rounds.

    Its arrays are views of ``bodies``. ``ahead_bytes`` is the size of the first rounds, which are not in ``bodies``.
    ``opening`` was decoded earlier; if it belongs to this head, the snapshot shares its prompt object.

    Raises SnapshotRefused, naming the field, if the head is truncated, damaged or of another schema, or if it
    contradicts the body or itself.
    """
    view = memoryview(head).cast("B")
    if opening is None or bytes(view[: len(opening.raw)]) != opening.raw:
        opening = opening_in(view)
    closing = view[len(opening.raw) :]
    manifest = _unsealed(closing)
    if closing.nbytes != _HEAD_START + manifest.nbytes:
        raise SnapshotRefused(f"head bytes = {view.nbytes}: its parts end before", "head bytes", view.nbytes)
    raw = [body if isinstance(body, np.ndarray | OnDevice) else np.frombuffer(body, np.uint8) for body in bodies]
    try:
        snapshot = _snapshot(opening, unpacked(manifest, CLOSING), raw, ahead_bytes)
        check_consistent(snapshot)
    except (ValueError, ArithmeticError) as error:
        raise SnapshotRefused(f"head: {error!r}", "head") from error
    return snapshot


def _sealed(manifest: Mapping[str, Any]) -> bytes:
    packed = msgpack.packb(manifest)
    preamble = _PREAMBLE.pack(MAGIC, SCHEMA, len(packed))
    return preamble + blake3(preamble).update(packed).digest() + packed


def _seal_of(part: Buffer) -> bytes:
    return bytes(part[_PREAMBLE.size : _HEAD_START])


def _unsealed(view: memoryview) -> memoryview:
    """The manifest of the first part of a head, after its seal was checked."""
    if view.nbytes <= _HEAD_START:
        said = f"head bytes = {view.nbytes}: each of its parts must have more than {_HEAD_START}"
        raise SnapshotRefused(said, "head bytes", view.nbytes)
    magic, schema, manifest_bytes = _PREAMBLE.unpack_from(view)
    if magic != MAGIC:
        raise SnapshotRefused(f"magic = {magic!r}: a snapshot begins with {MAGIC!r}", "magic", magic)
    if schema != SCHEMA:
        raise SnapshotRefused(f"schema = {schema}, this build reads {SCHEMA}", "schema", schema)
    manifest = view[_HEAD_START : _HEAD_START + manifest_bytes]
    if manifest.nbytes != manifest_bytes:
        said = f"head bytes = {view.nbytes}: its part claims {_HEAD_START + manifest_bytes}"
        raise SnapshotRefused(said, "head bytes", view.nbytes)
    if blake3(view[: _PREAMBLE.size]).update(manifest).digest() != _seal_of(view):
        raise SnapshotRefused("checksum: the head's bytes are not those that were written", "checksum")
    return manifest


def _snapshot(
    opening: Opening, manifest: dict[str, Any], bodies: list[np.ndarray | OnDevice], ahead_bytes: int
) -> KvSnapshot:
    if manifest["opening"] != _seal_of(opening.raw):
        raise SnapshotRefused("head: its closing belongs to another opening", "head.opening")
    layout, before = opening.layout, opening.request
    output_token_ids, logprobs = read_outputs(manifest)
    request = replace(
        before,
        output_token_ids=before.output_token_ids + output_token_ids,
        logprobs=before.logprobs + logprobs,
        sampling=read_sampling(manifest),
        **read_turns(manifest),
    )
    rounds = manifest["rounds"]
    kv_tokens = manifest["kv_tokens"]
    counts = _counts(layout, kv_tokens, rounds)
    ahead = _ahead(layout, counts, ahead_bytes)
    blocks = _pieces(layout, counts[ahead:], bodies)
    ahead_blocks = opening.prefix + sum(rounds[:ahead])
    return KvSnapshot(layout, request, kv_tokens, manifest["rng_draws"], blocks, ahead_blocks, manifest["state_tokens"])


def _counts(layout: KvLayout, kv_tokens: int, rounds: Sequence[int]) -> list[list[int]]:
    if not 0 < len(rounds) <= ROUNDS_MAX or min(rounds) < 1:
        raise SnapshotRefused(f"rounds = {rounds[:8]}: it must have 1 to {ROUNDS_MAX}, each of a block", "head.rounds")
    return [
        block_counts(layout, kv_tokens, count, is_last=number == len(rounds)) for number, count in enumerate(rounds, 1)
    ]


def _bytes_of(layout: KvLayout, counts: Sequence[int]) -> int:
    return sum(count * size for count, (_, size) in zip(counts, layout.layers, strict=True))


def _ahead(layout: KvLayout, counts: Sequence[Sequence[int]], ahead_bytes: int) -> int:
    first = 0
    while ahead_bytes > 0 and first < len(counts):
        ahead_bytes -= _bytes_of(layout, counts[first])
        first += 1
    if ahead_bytes or first == len(counts):
        said = f"rounds = {len(counts)}: the bytes sent ahead end within one, or include the last"
        raise SnapshotRefused(said, "rounds", len(counts))
    return first


def _pieces(
    layout: KvLayout, counts: Sequence[Sequence[int]], bodies: list[np.ndarray | OnDevice]
) -> dict[str, list[np.ndarray | OnDevice]]:
    round_bytes = [_bytes_of(layout, each) for each in counts]
    found_bytes = sum(body.nbytes for body in bodies)
    if sum(round_bytes) != found_bytes or min(map(min, counts)) < 0:
        said = f"body bytes = {found_bytes}: the head claims {sum(round_bytes)}"
        raise SnapshotRefused(said, "body bytes", found_bytes)
    blocks: dict[str, list[np.ndarray | OnDevice]] = {name: [] for name, _ in layout.layers}
    rest = iter(bodies)
    body, start = next(rest), 0
    for each, whole_bytes in zip(counts, round_bytes, strict=True):
        if start == body.nbytes:
            body, start = next(rest), 0
        if start + whole_bytes > body.nbytes:
            raise SnapshotRefused(f"rounds = {len(counts)}: the bodies end within a round", "rounds", len(counts))
        for (name, block_bytes), count in zip(layout.layers, each, strict=True):
            if count:
                blocks[name].append(body[start : start + count * block_bytes].reshape(count, block_bytes))
                start += count * block_bytes
    return blocks
