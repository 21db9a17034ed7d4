"""Layers that keep a state instead of KV of their tokens: on the wire, between shards and block sizes, and refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dora.data.types import RequestSpec, SamplingParams
from dora.errors import LayoutMisfit, SnapshotRefused
from dora.kvtransfer.codec import head_of, round_of, snapshot_of
from dora.kvtransfer.layout import body_bytes_most, check_layout
from dora.kvtransfer.reblock import reblocked
from dora.kvtransfer.reslice import resharded, resliced
from dora.kvtransfer.snapshot import STATE, Interior, KvLayout, KvSnapshot
from dora.worker.copying.cuda_blocks import DeviceStore
from dora.worker.vllm.blocks import BlockStore, LayerBlocks, memory_of, rows_of, span_of
from tests.refusals import refused

HEADS = 4
# A convolution's window of two tokens, whose channels are queries, keys and values, then the recurrent state.
STRIPS = ((1, 2), (1, 2), (1, 3), (1, 2), (1, 2), (1, 3), (1, 10))
STATE_BYTES = HEADS * sum(outer * inner for outer, inner in STRIPS)
TOKENS = 11
COUNTS = st.sampled_from([1, 2, 4])


def layout_of(block_tokens: int = 4) -> KvLayout:
    state, keys = (HEADS, STRIPS), (HEADS, ((2, 3),))
    return KvLayout(
        "f",
        "cpu",
        "float32",
        block_tokens,
        (("a.state", STATE_BYTES), ("b.attn", block_tokens * HEADS * 6)),
        windows=(STATE, 0),
        interiors=(state, keys),
    )


def made(layout: KvLayout, seed: int = 0) -> KvSnapshot:
    random = np.random.default_rng(seed)
    count = -(-TOKENS // layout.block_tokens)
    blocks = {
        name: [random.integers(0, 256, (1 if "state" in name else count, size), np.uint8)]
        for name, size in layout.layers
    }
    request = RequestSpec("r", 1, tuple(range(TOKENS)), SamplingParams(temperature=0.0), (5,), (-1.0,))
    return KvSnapshot(layout, request, TOKENS, 0, blocks, state_tokens=TOKENS)


def bytes_of(snapshot: KvSnapshot) -> dict[str, bytes]:
    return {name: np.concatenate(list(pieces)).tobytes() for name, pieces in snapshot.blocks.items()}


def head_bytes(state: np.ndarray, interior: Interior, head: int) -> list[bytes]:
    """The bytes of one head of a state, strip by strip."""
    heads, strips = interior
    found, at = [], 0
    for outer, inner in strips:
        strip = state.reshape(-1)[at : at + outer * heads * inner].reshape(outer, heads, inner)
        found.append(strip[:, head].tobytes())
        at += strip.size
    return found


def test_a_state_travels_in_the_last_round_alone() -> None:
    snapshot = made(layout_of())
    first, last = b"".join(round_of(snapshot, 0, 2)), b"".join(round_of(snapshot, 2, 3))
    assert len(first) == 2 * snapshot.layout.block_bytes
    assert len(last) == snapshot.layout.block_bytes + STATE_BYTES
    assert bytes_of(snapshot_of(head_of(snapshot, [2, 1]), first, last)) == bytes_of(snapshot)
    assert body_bytes_most(replace(snapshot.layout, interiors=()), TOKENS) == len(first) + len(last)


@given(found=COUNTS, wanted=COUNTS, seed=st.integers(0, 99))
def test_a_state_is_cut_and_joined_between_heads(found: int, wanted: int, seed: int) -> None:
    original = made(layout_of(), seed)
    sent = resliced(original, found)
    taken = resliced(sent, wanted)
    assert taken.layout == resharded(original.layout, wanted)
    assert bytes_of(resliced(taken, 1)) == bytes_of(original)
    names = [name for name, _ in taken.layout.layers if "state" in name]
    interior = taken.layout.interiors[0]
    heads = [head_bytes(np.asarray(taken.blocks[name][0]), interior, at) for name in names for at in range(interior[0])]
    whole = np.asarray(original.blocks["a.state"][0])
    assert heads == [head_bytes(whole, original.layout.interiors[0], at) for at in range(HEADS)]


def test_a_state_does_not_depend_on_the_block_size() -> None:
    sent = made(layout_of(4))
    taken = reblocked(sent, layout_of(6))
    assert bytes_of(taken)["a.state"] == bytes_of(sent)["a.state"]
    assert bytes_of(reblocked(taken, layout_of(4)))["a.state"] == bytes_of(sent)["a.state"]
    assert taken.state_tokens == TOKENS


def test_a_state_whose_heads_cannot_be_divided_fits_no_other_shards() -> None:
    whole = replace(layout_of(), interiors=((3, ((1, 12),)), (HEADS, ((2, 3),))), layers=(("a", 36), ("b", 96)))
    with refused(LayoutMisfit, field="layout.shards", value=1, names=("3 KV heads",)):
        resharded(whole, 2)


@pytest.mark.parametrize("other", [STATE_BYTES + HEADS, STATE_BYTES - HEADS])
def test_a_state_of_another_size_does_not_fit(other: int) -> None:
    ours = layout_of(6)
    theirs = replace(layout_of(4), layers=(("a.state", other), layout_of(4).layers[1]))
    with refused(LayoutMisfit, field="layout.block_tokens", value=4):
        check_layout(theirs, ours)
    with refused(LayoutMisfit, field="layout.layers", value=theirs.layers):
        check_layout(theirs, layout_of(4))


def test_a_snapshot_without_its_state_or_with_one_of_another_token_is_refused() -> None:
    snapshot = made(layout_of())
    for change, field, value in (
        ({"blocks": {**snapshot.blocks, "a.state": []}}, "blocks.a.state", []),
        ({"blocks": {"b.attn": snapshot.blocks["b.attn"]}}, "blocks", ["b.attn"]),
        ({"state_tokens": TOKENS - 1}, "state_tokens", TOKENS - 1),
        ({"state_tokens": 0}, "state_tokens", 0),
    ):
        with refused(SnapshotRefused, field=field, value=value):
            head_of(replace(snapshot, **change))
    stateless = replace(snapshot.layout, windows=())
    with refused(SnapshotRefused, field="state_tokens", value=TOKENS):
        head_of(replace(snapshot, layout=stateless))


def test_states_and_blocks_of_one_buffer_are_read_and_written_apart() -> None:
    """As vLLM lays them out on CPUs and GPUs: a page of either is as large, and a state leaves the rest of its page."""
    pages, page_bytes = 5, 64
    buffer = torch.arange(pages * page_bytes, dtype=torch.int16).to(torch.int8)
    state = buffer.as_strided((pages, 1, 1, 40), (page_bytes, 40, 40, 1))
    keys = buffer.view(torch.float32).as_strided((pages, 1, 4, 4), (16, 16, 4, 1))
    groups, raw = {"keys": 0, "state": 1}, buffer.view(torch.uint8).numpy().reshape(pages, page_bytes)
    rows = {}
    for name, tensor in (("keys", keys), ("state", state)):
        span = span_of(tensor, pages)
        layer = LayerBlocks(name, groups[name], STATE * groups[name], (0, ()), span)
        rows[name] = [rows_of(memory_of(tensor), layer, pages)]
    for store in (BlockStore(rows, groups), DeviceStore({"keys": keys, "state": state}, groups, pages)):
        assert dict(store.layers) == {"keys": page_bytes, "state": 40}
        before = raw.copy()
        shown = {name: np.concatenate(pieces).copy() for name, pieces in store.show([[1, 2], [3]]).items()}
        assert np.array_equal(shown["keys"], before[1:3]) and np.array_equal(shown["state"], before[3:4, :40])
        store.write([[], [4]], {"keys": [np.zeros((0, page_bytes), np.uint8)], "state": [shown["state"] ^ 1]})
        store.join()
        expected = before.copy()
        expected[4, :40] = before[3, :40] ^ 1
        assert np.array_equal(raw, expected)
