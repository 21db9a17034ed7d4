"""KV in the layouts of GPUs, on CPU tensors: the code is the same, without a stream."""

import gc
import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dora.errors import TransferFailed
from dora.kvtransfer.codec import Opening
from dora.kvtransfer.device import is_on_device
from dora.kvtransfer.snapshot import KvLayout
from dora.worker.copying.cuda_blocks import DeviceStore
from dora.worker.copying.layer_rows import LayerRows, TensorMisfit
from dora.worker.reservation import PreparedOpening, Reservation
from tests.cuda_layouts import KINDS, Sizes, check_both_ways, made
from tests.refusals import refused
from tests.streams import Simulated
from tests.sweeps import examples

SIZES = st.builds(
    Sizes,
    layers=st.integers(1, 3),
    blocks=st.integers(1, 7),
    heads=st.integers(1, 3),
    tokens=st.integers(1, 5),
    content=st.integers(1, 9),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn]),
    padding=st.sampled_from([0, 0, 3]),
)
SOME = Sizes(layers=2, blocks=6, heads=2, tokens=4, content=8, dtype=torch.bfloat16)


@settings(max_examples=examples(300), deadline=None)
@given(kind=st.sampled_from(sorted(KINDS)), sizes=SIZES, seed=st.integers(0, 1000), stage_bytes=st.integers(1, 400))
def test_blocks_go_out_and_in_bit_for_bit(kind: str, sizes: Sizes, seed: int, stage_bytes: int) -> None:
    if kind in ("2BNHC", "B2NHC") and sizes.blocks == 2:  # refused: see below
        sizes = replace(sizes, blocks=3)
    check_both_ways(kind, sizes, "cpu", seed, stage_bytes)


@pytest.mark.parametrize("split", [2, 4])
def test_kernel_blocks_of_one_block_move_together(split: int) -> None:
    check_both_ways("BNC", replace(SOME, split=split), "cpu", 3, 1000)


@pytest.mark.parametrize(
    ("kind", "runs"), [("LBNHC", ()), ("BLHNC", ()), ("LHBNC", (2,)), ("2BNHC", (2,)), ("BNC", ())]
)
def test_a_block_is_as_few_runs_as_its_layout_allows(kind: str, runs: tuple[int, ...]) -> None:
    """A copy of long runs of eight bytes at a time is what a GPU is fast at."""
    rows = LayerRows(made(kind, SOME, "cpu", 0).tensors["layer.0"], SOME.blocks)
    assert rows.cells.dtype == torch.int64 and tuple(rows.cells.shape[1:-1]) == runs


def test_layouts_whose_blocks_differ_inside_have_other_orders() -> None:
    order = {
        kind: DeviceStore(made(kind, SOME, "cpu", 0).tensors, {"layer.0": 0, "layer.1": 0}, SOME.blocks).orders
        for kind in ("LBHNC", "BLHNC", "LBNHC", "BLNHC")
    }
    assert order["LBHNC"] == order["BLHNC"] != order["LBNHC"] == order["BLNHC"]


@pytest.mark.parametrize(
    ("tensor", "field"),
    [
        (torch.zeros(7, 2, 4, 8), "shape"),
        (torch.zeros(6, 3, 2, 4, 8), "shape"),
        (torch.zeros(1, 2, 4, 8).expand(6, 2, 4, 8), "stride"),
        (torch.zeros(99).as_strided((6, 2, 4), (4, 4, 1)), "stride"),
    ],
)
def test_a_tensor_that_is_not_such_blocks_is_refused(tensor: torch.Tensor, field: str) -> None:
    with refused(TensorMisfit, field=field):
        LayerRows(tensor, 6)


def test_a_tensor_that_may_be_either_is_refused() -> None:
    with refused(TensorMisfit, field="shape", names=(2,)):
        LayerRows(torch.zeros(2, 2, 4, 2, 8), 2)


def test_an_id_beyond_the_cache_is_refused_before_the_device_sees_it() -> None:
    store = DeviceStore(made("LBNHC", SOME, "cpu", 0).tensors, {"layer.0": 0}, SOME.blocks)
    for wrong in (-1, SOME.blocks):
        with refused(RuntimeError, names=(wrong, SOME.blocks)):
            store.show([[wrong]])


def test_pinned_memory_is_bounded_and_comes_back() -> None:
    sizes = replace(SOME, tokens=1 << 12)  # 128 KiB a block and layer
    made_there = made("LBNHC", sizes, "cpu", 0)
    store = DeviceStore(made_there.tensors, {"layer.0": 0}, sizes.blocks, pinned_bytes=512 << 10)
    held = store.show([[0, 1, 2]])
    with refused(TransferFailed, names=("393", "216", "393", "216")):
        store.show([[3, 4, 5]])
    del held
    gc.collect()
    shown = store.show([[3, 4, 5]])
    assert np.array_equal(np.concatenate(shown["layer.0"]), made_there.bytes_of("layer.0")[3:])


def test_what_was_shown_stays_as_it_was() -> None:
    made_there = made("2BNHC", SOME, "cpu", 0)
    store = DeviceStore(made_there.tensors, {"layer.0": 0}, SOME.blocks)
    shown, before = store.show([[1, 4]]), made_there.bytes_of("layer.0")[[1, 4]]
    store.write([[1, 4]], {"layer.0": [np.zeros_like(before)]})
    assert not made_there.bytes_of("layer.0")[[1, 4]].any()
    assert np.array_equal(np.concatenate(shown["layer.0"]), before)


def test_a_reservation_writes_slices_of_the_stores_stage() -> None:
    """Each write crosses the bus by itself, so it must fill the stage."""
    found = made("LBHNC", SOME, "cpu", 0)
    groups = dict.fromkeys(found.tensors, 0)
    plain = DeviceStore(found.tensors, groups, SOME.blocks)
    block_bytes = sum(size for _, size in plain.layers)
    layout = KvLayout("fingerprint", "backend", "uint8", SOME.tokens, plain.layers)
    body = np.random.default_rng(1).integers(0, 255, 4 * block_bytes, np.uint8)
    for stage_bytes, writes in ((plain.slice_bytes, 1), (2 * block_bytes, 2), (block_bytes, 4)):
        store = Counting(found.tensors, groups, SOME.blocks, stage_bytes=stage_bytes)
        reservation = Reservation(layout, range(4), store, lambda _: None)
        reservation._begun = PreparedOpening(cast(Opening, SimpleNamespace(layout=layout)), None)
        assert reservation.write(0, body) and store.writes == writes


class Counting(DeviceStore):
    writes = 0

    def write(self, *arguments: Any) -> None:
        self.writes += 1
        super().write(*arguments)


@settings(max_examples=examples(100), deadline=None)
@given(kind=st.sampled_from(sorted(KINDS)), sizes=SIZES, stage_bytes=st.integers(1, 400), landing=st.data())
def test_lent_blocks_are_the_blocks_that_are_shown_and_land_where_they_are_written(
    kind: str, sizes: Sizes, stage_bytes: int, landing: st.DataObject
) -> None:
    """Any run of their bytes, on the device and in host memory; and from one device's cache into another's."""
    sizes = replace(sizes, blocks=max(3, sizes.blocks))
    there, other = made(kind, sizes, "cpu", 1), made(kind, sizes, "cpu", 2)
    stores = [
        DeviceStore(
            each.tensors,
            dict.fromkeys(each.tensors, 0),
            sizes.blocks,
            stage_bytes=stage_bytes,
            landing_bytes=1 << 20,
        )
        for each in (there, other)
    ]
    ids = landing.draw(st.lists(st.integers(0, sizes.blocks - 1), min_size=1, max_size=5, unique=True))
    shown, lent = stores[0].show([ids]), stores[0].lend([ids])
    for name, (piece,) in lent.items():
        whole = np.concatenate(shown[name])
        assert is_on_device([piece]) and np.array_equal(np.asarray(piece), whole)
        flat = piece.reshape(-1)
        begin = landing.draw(st.integers(0, flat.nbytes))
        end = landing.draw(st.integers(begin, flat.nbytes))
        assert np.array_equal(np.asarray(flat[begin:end]), whole.reshape(-1)[begin:end])
    onto = ids[::-1]
    before = stores[1].show([[block for block in range(sizes.blocks) if block not in onto]])
    stores[1].write([onto], lent)
    after = stores[1].show([onto])
    assert all(np.array_equal(np.concatenate(after[name]), np.concatenate(shown[name])) for name in shown)
    rest = stores[1].show([[block for block in range(sizes.blocks) if block not in onto]])
    assert all(
        np.array_equal(piece, left) for name in before for piece, left in zip(before[name], rest[name], strict=True)
    )


@pytest.mark.parametrize("seed", range(20))
def test_lent_blocks_are_those_after_the_engines_work_whatever_order_the_device_chooses(seed: int) -> None:
    """The engine writes, lends and goes on with other blocks; what lands is written before its next step reads it."""
    device = Simulated(random.Random(seed))
    cache = torch.zeros(6, 4, 8, dtype=torch.uint8)
    store = DeviceStore({"a": cache}, {"a": 0}, 6, stage_bytes=64, landing_bytes=1 << 20, streams=device)
    device.kernel(partial(_fill_block, cache, 2, 7))
    ((piece,),) = store.lend([[2, 4]]).values()
    device.kernel(partial(_fill_block, cache, 3, 9))
    assert np.asarray(piece)[0].tolist() == [7] * 32
    memory = store.device_memory
    assert memory is not None
    landed = memory.array(64)
    assert landed is not None
    piece.fill(landed.tensor())
    store.write([[0, 5]], {"a": [landed.reshape(2, 32)]})
    landed.tensor().fill_(1)  # its memory has gone to others
    store.join()
    read: list[list[int]] = []
    device.kernel(lambda: read.append(cache[0].reshape(-1).tolist()))
    device.all()
    assert read == [[7] * 32]


def _fill_block(cache: torch.Tensor, block_id: int, value: int) -> None:
    cache[block_id] = value
