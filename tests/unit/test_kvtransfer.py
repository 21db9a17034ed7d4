"""The snapshot's wire format and its checks."""

import struct
from dataclasses import replace

import msgpack
import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from dora.errors import SnapshotRefused
from dora.kvtransfer.codec import ALIGNMENT, MAGIC, decode, encode
from dora.kvtransfer.layout import blocks_for, check_consistent, check_layout
from dora.kvtransfer.snapshot import SCHEMA, KvLayout, KvSnapshot
from dora.types import RequestSpec, SamplingParams

LAYOUT = KvLayout("f" * 64, "cpu/vec", "float32", 4, (("layer.0", 96), ("layer.1", 40)))
TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20).map(tuple)


@st.composite
def snapshots(draw: st.DrawFn) -> KvSnapshot:
    outputs = draw(TOKENS)
    logprobs = tuple(draw(st.lists(st.floats(-100, 0), min_size=len(outputs), max_size=len(outputs))))
    sampling = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.7])),
        seed=draw(st.integers(0, 2**63 - 1)),
        stop_token_ids=draw(TOKENS),
        stop=tuple(draw(st.lists(st.text(max_size=9), max_size=3))),
        ignore_eos=draw(st.booleans()),
    )
    request = RequestSpec(
        draw(st.text(max_size=40)), draw(st.integers(0, 2**40)), draw(TOKENS), sampling, outputs, logprobs
    )
    kv_tokens = len(request.prompt_token_ids) + len(outputs) - 1
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = blocks_for(kv_tokens, LAYOUT.block_tokens)
    blocks = {name: generator.integers(0, 256, (count, size), np.uint8) for name, size in LAYOUT.layers}
    return KvSnapshot(LAYOUT, request, kv_tokens, len(outputs) if sampling.temperature else 0, blocks)


def make_snapshot() -> KvSnapshot:
    request = RequestSpec("r1", 7, (1, 2, 3), SamplingParams(seed=5), (4, 5, 6), (-0.5, -1.25, -0.1))
    blocks = {name: np.full((2, size), 9, np.uint8) for name, size in LAYOUT.layers}
    return KvSnapshot(LAYOUT, request, 5, 3, blocks)


def wire(snapshot: KvSnapshot) -> bytes:
    return b"".join(encode(snapshot))


@given(snapshots())
def test_a_snapshot_survives_the_wire(snapshot: KvSnapshot) -> None:
    found = decode(wire(snapshot))
    assert (found.layout, found.request) == (snapshot.layout, snapshot.request)
    assert (found.kv_tokens, found.rng_draws) == (snapshot.kv_tokens, snapshot.rng_draws)
    for name, blocks in snapshot.blocks.items():
        np.testing.assert_array_equal(found.blocks[name], blocks)


def test_blocks_are_views_of_the_buffer_and_aligned_within_it() -> None:
    buffer = np.frombuffer(wire(make_snapshot()), np.uint8)
    found = decode(buffer.data)
    for blocks in found.blocks.values():
        assert np.shares_memory(blocks, buffer)
        assert (blocks.ctypes.data - buffer.ctypes.data) % ALIGNMENT == 0
        assert not blocks.flags.writeable


@given(st.data())
def test_one_flipped_bit_anywhere_is_refused(data: st.DataObject) -> None:
    raw = bytearray(wire(make_snapshot()))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(SnapshotRefused):
        decode(raw)


@given(st.data())
def test_a_piece_of_a_snapshot_is_refused(data: st.DataObject) -> None:
    raw = wire(make_snapshot())
    with pytest.raises(SnapshotRefused):
        decode(raw[: data.draw(st.integers(0, len(raw) - 1))])


def test_each_refusal_names_its_field() -> None:
    raw = wire(make_snapshot())
    for damaged, name in (
        (b"", "total bytes = 0"),
        (raw + b"\0", "total bytes"),
        (b"GARBAGE!" + raw[8:], "magic"),
        (raw[:8] + struct.pack("<I", SCHEMA + 1) + raw[12:], f"schema = {SCHEMA + 1}, this build reads {SCHEMA}"),
        (raw[:16] + struct.pack("<Q", 2**60) + raw[24:], "header bytes"),
        (raw[:-1] + b"\1", "checksum"),
    ):
        with pytest.raises(SnapshotRefused, match=name):
            decode(damaged)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kv_tokens", 10**9),
        ("kv_tokens", -1),
        ("kv_tokens", "many"),
        ("layout", {}),
        ("layout", None),
        ("sampling", {"temperature": 1.0, "stop_token_ids": []}),
        ("prompt_token_ids", b"abc"),
        ("logprobs", b""),
    ],
)
def test_a_header_with_a_right_checksum_and_wrong_content_is_refused(key: str, value: object) -> None:
    raw = wire(make_snapshot())
    header_bytes = struct.unpack_from("<Q", raw, 16)[0]
    header = msgpack.unpackb(raw[64 : 64 + header_bytes])
    text = msgpack.packb({**header, key: value})
    body = text + bytes(-len(text) % 64) + raw[64 + -(-header_bytes // 64) * 64 :]
    preamble = struct.pack("<8sIIQQ", MAGIC, SCHEMA, 0, len(text), 64 + len(body))
    with pytest.raises(SnapshotRefused, match=f"header|{key}"):
        decode(preamble + blake3(preamble + body).digest() + body)


def test_layouts_are_compared_field_by_field() -> None:
    check_layout(LAYOUT, replace(LAYOUT))
    for change in (
        {"fingerprint": "g"},
        {"backend": "cpu/amx"},
        {"dtype": "bfloat16"},
        {"block_tokens": 8},
        {"layers": LAYOUT.layers[:1]},
        {"tp_rank": 1},
        {"tp_size": 2},
    ):
        with pytest.raises(SnapshotRefused, match=rf"layout\.{next(iter(change))}"):
            check_layout(replace(LAYOUT, **change), LAYOUT)


def test_contradictions_within_a_snapshot_are_refused_on_both_ends() -> None:
    good = make_snapshot()
    check_consistent(good)
    for change, name in (
        ({"kv_tokens": 6}, "kv_tokens = 6"),
        ({"rng_draws": 2}, "rng_draws = 2"),
        ({"request": replace(good.request, logprobs=(-1.0,))}, "logprobs"),
        ({"request": replace(good.request, output_token_ids=(), logprobs=())}, "at least one output"),
        ({"blocks": {**good.blocks, "layer.9": good.blocks["layer.0"]}}, "layer.9"),
        ({"blocks": {**good.blocks, "layer.0": good.blocks["layer.0"][:1]}}, "layer.0"),
        ({"blocks": {**good.blocks, "layer.1": good.blocks["layer.1"].astype(np.int8)}}, "int8"),
    ):
        with pytest.raises(SnapshotRefused, match=name):
            encode(replace(good, **change))
