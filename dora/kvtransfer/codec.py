"""A snapshot as bytes: versioned, self-describing, checksummed.

All integers little-endian. Every part starts at a multiple of 64 bytes; the gaps are zero.

    0   8   magic  "DORA-KV\\0"
    8   4   schema (1)
    12  4   reserved, zero
    16  8   header bytes
    24  8   total bytes
    32  32  BLAKE3 of everything else: bytes 0..32, then 64..total
    64      header: msgpack map; token ids as int32, logprobs as float64, raw
    ...     blocks of each layer in the header's order, raw

BLAKE3 guards against damage, not against forgery: whoever may write snapshots may write any snapshot.
"""

from collections.abc import Iterable
from dataclasses import asdict, fields
from struct import Struct
from typing import Any, Final

import msgpack
import numpy as np
from blake3 import blake3

from dora.errors import SnapshotRefused
from dora.kvtransfer.layout import blocks_for, check_consistent
from dora.kvtransfer.snapshot import SCHEMA, KvLayout, KvSnapshot
from dora.types import RequestSpec, SamplingParams

MAGIC: Final = b"DORA-KV\0"
ALIGNMENT: Final = 64
_PREAMBLE: Final = Struct("<8sIIQQ")
_DIGEST_START: Final = _PREAMBLE.size
_PREAMBLE_BYTES: Final = _DIGEST_START + 32
_ZEROS: Final = bytes(ALIGNMENT)


def encode(snapshot: KvSnapshot) -> list[bytes | memoryview]:
    """The snapshot as buffers to be written one after the other; KV is not copied.

    Raises SnapshotRefused where its parts contradict each other.
    """
    check_consistent(snapshot)
    header = msgpack.packb(_header(snapshot))
    body: list[bytes | memoryview] = [header, _gap(len(header))]
    for name, _ in snapshot.layout.layers:
        raw = np.ascontiguousarray(snapshot.blocks[name]).reshape(-1).data
        body += [raw, _gap(raw.nbytes)]
    total = _PREAMBLE_BYTES + sum(memoryview(part).nbytes for part in body)
    preamble = _PREAMBLE.pack(MAGIC, SCHEMA, 0, len(header), total)
    return [preamble, _digest([preamble, *body]), *body]


def decode(buffer: bytes | bytearray | memoryview) -> KvSnapshot:
    """The snapshot in ``buffer``, checked; its arrays are read-only views of ``buffer``.

    Raises SnapshotRefused, naming the field, where it is truncated, damaged, of another schema or inconsistent.
    """
    view = memoryview(buffer).cast("B").toreadonly()
    header_bytes, total = _check_preamble(view)
    if _digest([view[:_DIGEST_START], view[_PREAMBLE_BYTES:total]]) != view[_DIGEST_START:_PREAMBLE_BYTES]:
        raise SnapshotRefused("checksum: the snapshot's bytes are not those that were written")
    try:
        header = msgpack.unpackb(view[_PREAMBLE_BYTES : _PREAMBLE_BYTES + header_bytes])
        snapshot = _snapshot(header, view, _aligned(_PREAMBLE_BYTES + header_bytes))
    except (KeyError, TypeError, ValueError) as error:
        raise SnapshotRefused(f"header: {error!r}") from error
    check_consistent(snapshot)
    return snapshot


def _check_preamble(view: memoryview) -> tuple[int, int]:
    """Header bytes and total bytes."""
    if view.nbytes < _PREAMBLE_BYTES:
        raise SnapshotRefused(f"total bytes = {view.nbytes}, a snapshot has at least {_PREAMBLE_BYTES}")
    magic, schema, _, header_bytes, total = _PREAMBLE.unpack_from(view)
    if magic != MAGIC:
        raise SnapshotRefused(f"magic = {magic!r}, a snapshot begins with {MAGIC!r}")
    if schema != SCHEMA:
        raise SnapshotRefused(f"schema = {schema}, this build reads {SCHEMA}")
    if total != view.nbytes:
        raise SnapshotRefused(f"total bytes = {view.nbytes}, its preamble says {total}")
    if header_bytes > total - _PREAMBLE_BYTES:
        raise SnapshotRefused(f"header bytes = {header_bytes}, the snapshot has {total}")
    return header_bytes, total


def _header(snapshot: KvSnapshot) -> dict[str, Any]:
    request = snapshot.request
    return {
        "layout": asdict(snapshot.layout),
        "kv_tokens": snapshot.kv_tokens,
        "rng_draws": snapshot.rng_draws,
        "request_id": request.request_id,
        "version": request.version,
        "prompt_token_ids": np.asarray(request.prompt_token_ids, "<i4").tobytes(),
        "output_token_ids": np.asarray(request.output_token_ids, "<i4").tobytes(),
        "logprobs": np.asarray(request.logprobs, "<f8").tobytes(),
        "sampling": asdict(request.sampling),
    }


def _snapshot(header: dict[str, Any], view: memoryview, start: int) -> KvSnapshot:
    layout_fields = dict(header["layout"])
    layout_fields["layers"] = tuple((str(name), int(block_bytes)) for name, block_bytes in layout_fields["layers"])
    layout = KvLayout(**layout_fields)
    sampling_fields = dict(header["sampling"])
    for name in ("stop", "stop_token_ids"):
        sampling_fields[name] = tuple(sampling_fields[name])
    if set(sampling_fields) != {field.name for field in fields(SamplingParams)}:
        raise ValueError(f"sampling fields {sorted(sampling_fields)}")
    request = RequestSpec(
        request_id=str(header["request_id"]),
        version=int(header["version"]),
        prompt_token_ids=tuple(np.frombuffer(header["prompt_token_ids"], "<i4").tolist()),
        sampling=SamplingParams(**sampling_fields),
        output_token_ids=tuple(np.frombuffer(header["output_token_ids"], "<i4").tolist()),
        logprobs=tuple(np.frombuffer(header["logprobs"], "<f8").tolist()),
    )
    kv_tokens = int(header["kv_tokens"])
    blocks = {}
    count = blocks_for(kv_tokens, layout.block_tokens)
    for name, block_bytes in layout.layers:
        raw = np.frombuffer(view, np.uint8, count * block_bytes, start)
        blocks[name] = raw.reshape(count, block_bytes)
        start = _aligned(start + raw.nbytes)
    return KvSnapshot(layout, request, kv_tokens, int(header["rng_draws"]), blocks)


def _digest(parts: Iterable[bytes | memoryview]) -> bytes:
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _gap(length: int) -> bytes:
    return _ZEROS[: _aligned(length) - length]
