"""KV blocks out of a GPU's memory and into it. Needs torch with CUDA and no vLLM."""

import threading

import numpy as np
import pytest
import torch

from dora.kvtransfer.device import OnDevice
from dora.weights.words import checksum
from dora.worker.copying.cuda_blocks import DeviceStore
from tests.cuda_layouts import KINDS, Sizes, check_both_ways, made

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU"),
]
CYCLES = 200_000_000  # of the GPU: about a tenth of a second, in which its stream stands still


def sizes_of(**changed: object) -> Sizes:
    found = {"layers": 3, "blocks": 17, "heads": 4, "tokens": 16, "content": 128, "dtype": torch.bfloat16}
    return Sizes(**(found | changed))


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("stage_bytes", [1, 100_000, 16 << 20])
def test_blocks_go_out_and_in_bit_for_bit(kind: str, stage_bytes: int) -> None:
    for seed in range(5):
        check_both_ways(kind, sizes_of(), "cuda", seed, stage_bytes)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_odd_sizes_too(kind: str) -> None:
    for dtype in (torch.uint8, torch.float32, torch.float8_e4m3fn):
        check_both_ways(kind, sizes_of(heads=3, tokens=5, content=7, padding=3, dtype=dtype), "cuda", 1, 400)


def test_kernel_blocks_of_one_block_move_together() -> None:
    check_both_ways("BNC", sizes_of(split=4), "cuda", 1, 1 << 20)


def test_what_is_shown_is_pinned_and_what_the_stream_was_told_before_is_in_it() -> None:
    there = made("LBHNC", sizes_of(), "cuda", 0)
    store = DeviceStore(there.tensors, dict.fromkeys(there.tensors, 0), 17)
    torch.cuda._sleep(CYCLES)
    there.buffer.view(torch.uint8).fill_(77)
    shown = store.show([[3, 9]])
    assert all((piece == 77).all() for pieces in shown.values() for piece in pieces)
    assert torch.from_numpy(shown["layer.0"][0]).is_pinned()


def test_a_step_that_joins_finds_what_another_thread_has_written() -> None:
    there = made("BLNHC", sizes_of(blocks=500), "cuda", 0)
    store = DeviceStore(there.tensors, dict.fromkeys(there.tensors, 0), 500)
    ids = list(range(0, 500, 2))
    blocks = {name: [np.full((len(ids), size), 5, np.uint8)] for name, size in store.layers}
    step = torch.cuda.Stream()
    writer = threading.Thread(target=store.write, args=([ids], blocks))
    writer.start()
    writer.join()
    with torch.cuda.stream(step):
        store.join()
        read = there.buffer.clone()
    step.synchronize()
    raw = read.view(torch.uint8).cpu().numpy()
    assert all((raw[places[ids]] == 5).all() for places in there.places.values())


@pytest.mark.parametrize("joins", [True, False])
def test_kv_that_is_written_within_a_step_is_there_only_if_the_step_joins_again(joins: bool) -> None:
    """The copies are late, as over a busy bus."""
    there = made("BLNHC", sizes_of(), "cuda", 0)
    store = DeviceStore(there.tensors, dict.fromkeys(there.tensors, 0), 17)
    ids, step = [3, 9], torch.cuda.Stream()
    blocks = {name: [np.full((len(ids), size), 5, np.uint8)] for name, size in store.layers}
    with torch.cuda.stream(step):
        store.join()
        store.queue(lambda: torch.cuda._sleep(CYCLES))
        store.write([ids], blocks)
        if joins:
            store.join()
        read = there.buffer.clone()
    step.synchronize()
    raw = read.view(torch.uint8).cpu().numpy()
    assert all((raw[places[ids]] == 5).all() == joins for places in there.places.values())


def test_threads_write_beside_each_other() -> None:
    """Each its own blocks, through the same staging memory."""
    there = made("LHBNC", sizes_of(blocks=64), "cuda", 0)
    store = DeviceStore(there.tensors, dict.fromkeys(there.tensors, 0), 64, stage_bytes=1 << 18)

    def write(number: int) -> None:
        for _ in range(20):
            blocks = {name: [np.full((16, size), number, np.uint8)] for name, size in store.layers}
            store.write([list(range(number, 64, 4))], blocks)

    writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for each in writers:
        each.start()
    for each in writers:
        each.join()
    store.join()
    for name in there.tensors:
        rows = there.bytes_of(name)
        assert all((rows[number::4] == number).all() for number in range(4))


def test_lent_blocks_are_those_after_the_engines_work_and_land_before_the_next_step() -> None:
    """The stream stands still when blocks are lent and when they are written."""
    there = made("LBHNC", sizes_of(), "cuda", 0)
    store = DeviceStore(there.tensors, dict.fromkeys(there.tensors, 0), 17, landing_bytes=64 << 20)
    memory = store.device_memory
    assert memory is not None and memory.kind == "cuda"
    torch.cuda._sleep(CYCLES)
    there.buffer.view(torch.uint8).fill_(77)
    lent = {name: pieces[0] for name, pieces in store.lend([[3, 9]]).items()}
    landed = {}
    for name, piece in lent.items():
        assert isinstance(piece, OnDevice)
        place = memory.array(piece.nbytes)
        assert place is not None and place.tensor().is_cuda
        piece.fill(place.tensor())
        assert memory.digest([place]) == checksum(place.tensor().cpu())
        landed[name] = [place.reshape(*piece.shape)]
    there.buffer.view(torch.uint8).fill_(1)
    torch.cuda._sleep(CYCLES)
    store.write([[2, 16]], landed)
    store.join()
    shown = store.show([[2, 16]])
    assert all((piece == 77).all() for pieces in shown.values() for piece in pieces)
