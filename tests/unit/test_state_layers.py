"""Layers that keep a state instead of KV of their tokens: on the wire, between shards and block sizes, and refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SinkFullAttentionSpec,
)

from dora.data.types import RequestSpec, SamplingParams
from dora.errors import InvalidValue, LayoutMisfit, SnapshotRefused
from dora.kvtransfer.codec import head_of, round_of, snapshot_of
from dora.kvtransfer.layout import body_bytes_most, check_layout, first_block
from dora.kvtransfer.reblock import reblocked
from dora.kvtransfer.reslice import resharded, resliced
from dora.kvtransfer.snapshot import STATE, Interior, KvLayout, KvSnapshot
from dora.models.tiny import make_tiny
from dora.weights.delta import decode, encode
from dora.worker.copying.cuda_blocks import DeviceStore
from dora.worker.vllm.blocks import BlockStore, LayerBlocks, memory_of, rows_of, span_of
from dora.worker.vllm.core import check_kernels
from dora.worker.vllm.groups import unmovable
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


@given(tokens=st.integers(1, 200), chunk=st.integers(2, 70), block=st.sampled_from([1, 4, 16]))
def test_a_chunk_is_read_from_its_beginning(tokens: int, chunk: int, block: int) -> None:
    first = first_block(tokens, block, -chunk)
    read = [at for at in range(tokens) if at // chunk == tokens // chunk]  # by the next token, at ``tokens``
    assert first * block <= min(read, default=tokens) < (first + 1) * block
    assert not read or first == min(read) // block


@pytest.mark.parametrize(
    ("architecture", "layers"),
    [
        ("MambaForCausalLM", "Mamba-1"),
        ("JambaForCausalLM", "Mamba-1"),
        ("KimiLinearForCausalLM", "Kimi delta attention"),
        ("DeepseekV32ForCausalLM", "sparse attention"),
    ],
)
def test_a_model_whose_layers_have_no_kernel_on_a_cpu_is_refused_by_name(
    tmp_path: Path, architecture: str, layers: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    with refused(InvalidValue, field="model", value=str(tmp_path), names=(layers,)):
        check_kernels(tmp_path)


def spec_of(block_tokens: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_tokens, num_kv_heads=1, head_size=64, dtype=torch.float32)


def test_groups_that_cannot_move_are_named() -> None:
    state: dict[str, Any] = {"block_size": 256, "shapes": ((4, 4),), "dtypes": (torch.float32,)}
    for specs, said in (
        ((spec_of(32), spec_of(64)), "64"),
        ((spec_of(32), MambaSpec(**state, mamba_cache_mode="align")), "several states of a request (align)"),
        ((spec_of(32), MambaSpec(**state, num_speculative_blocks=1)), "several states of a request"),
        (
            (spec_of(32), SinkFullAttentionSpec(block_size=32, num_kv_heads=1, head_size=64, dtype=torch.float32)),
            "Sink",
        ),
    ):
        groups = [KVCacheGroupSpec([f"l{at}"], spec) for at, spec in enumerate(specs)]
        assert said in unmovable(KVCacheConfig(9, [], groups), 32, 1, 1)
    assert not unmovable(KVCacheConfig(9, [], [KVCacheGroupSpec(["l"], MambaSpec(**state))]), 256, 1, 0), "no attention"


def test_deltas_of_a_hybrids_weights_come_back_to_the_bit(tmp_path: Path) -> None:
    """Gates, convolutions and decays have other shapes and types than projections."""
    first, second = (make_tiny("hybrid", tmp_path / str(seed), seed=seed) for seed in (1, 2))
    before, after = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert {name.split(".")[-1] for name in before} >= {"A_log", "dt_bias"}
    for name, tensor in before.items():
        old, few = tensor.numpy().tobytes(), tensor.clone()
        few.view(-1)[::7] += 1e-3
        for new in (after[name].numpy().tobytes(), few.numpy().tobytes()):
            assert decode(encode(new, old, tensor.element_size()), old, len(new)) == new
