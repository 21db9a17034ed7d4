"""Weights onto a GPU through pinned memory. Needs torch with CUDA and no vLLM."""

import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dora.errors import DeadlineExceeded
from dora.weights.load_time import LoadDeadline
from dora.worker.copying.weight_ring import WeightRing
from tests.refusals import refused

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU"),
]
CYCLES = 200_000_000  # of the GPU: about a tenth of a second, in which its stream stands still
LONG_S = 600.0
DEVICE = torch.device("cuda")


def version(folder: Path, seed: int, megabytes: int = 8) -> tuple[list[Path], dict[str, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(seed)
    sizes = {"large": megabytes << 19, "odd": 12_345, "one": 1, "none": 0}
    tensors = {
        name: torch.randint(0, 1 << 15, (size,), generator=drawn, dtype=torch.int16).view(torch.bfloat16)
        for name, size in sizes.items()
    }
    save_file(tensors, folder / f"{seed}.safetensors")
    return [folder / f"{seed}.safetensors"], tensors


def same(there: torch.Tensor, here: torch.Tensor) -> bool:
    return torch.equal(there.cpu().view(torch.int16), here.view(torch.int16))


@pytest.mark.parametrize("slot_bytes", [4096, 1 << 20, 16 << 20])
def test_tensors_arrive_bit_for_bit_in_memory_that_stays(tmp_path: Path, slot_bytes: int) -> None:
    ring = WeightRing(DEVICE, slot_bytes=slot_bytes)
    places: dict[str, torch.Tensor] = {}
    for seed in (1, 2, 1):
        files, tensors = version(tmp_path, seed)
        for name, tensor in ring.tensors(files, LoadDeadline(LONG_S, 1)):
            assert tensor.is_cuda
            places.setdefault(name, torch.empty_like(tensor)).copy_(tensor)
        addresses = {name: place.data_ptr() for name, place in places.items()}
        assert all(same(places[name], tensor) for name, tensor in tensors.items())
        assert addresses == {name: place.data_ptr() for name, place in places.items()}


def test_slots_are_pinned() -> None:
    ring = WeightRing(DEVICE, slots=2, slot_bytes=4096)
    assert all(torch.from_numpy(slot.memory[7:]).is_pinned() for slot in ring._slots)


def test_copies_wait_for_an_engine_that_still_reads_the_memory(tmp_path: Path) -> None:
    """The allocator gives a tensor's memory to the next one while the engine's stream stands still."""
    files, tensors = version(tmp_path, 3, megabytes=32)
    ring, places = WeightRing(DEVICE, slots=2, slot_bytes=1 << 20), {}
    for _ in range(3):
        for name, tensor in ring.tensors(files, LoadDeadline(LONG_S, 1)):
            torch.cuda._sleep(CYCLES)
            places.setdefault(name, torch.empty_like(tensor)).copy_(tensor)
            del tensor
    assert all(same(places[name], tensor) for name, tensor in tensors.items())


def test_an_engine_that_is_told_to_read_at_once_finds_the_bytes(tmp_path: Path) -> None:
    files, tensors = version(tmp_path, 4, megabytes=64)
    ring, stream = WeightRing(DEVICE), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        read = {name: tensor.clone() for name, tensor in ring.tensors(files, LoadDeadline(LONG_S, 1))}
    stream.synchronize()
    assert all(same(read[name], tensor) for name, tensor in tensors.items())


def test_a_load_that_is_given_up_writes_nothing_later(tmp_path: Path) -> None:
    files, tensors = version(tmp_path, 5, megabytes=64)
    ring = WeightRing(DEVICE, slots=2, slot_bytes=1 << 20)
    with refused(DeadlineExceeded, field="load_s"), closing(ring.tensors(files, LoadDeadline(0.0, 1))) as found:
        list(found)
    filled = [torch.full((1 << 20,), 7, dtype=torch.uint8, device=DEVICE) for _ in range(128)]
    torch.cuda.synchronize()
    assert all(bool((memory == 7).all()) for memory in filled)
    found_again = dict(ring.tensors(files, LoadDeadline(LONG_S, 1)))
    assert all(same(found_again[name], tensor) for name, tensor in tensors.items())


def test_the_times_of_both_ways_are_printed(tmp_path: Path) -> None:
    """Shown, not bounded: its times are for a report (``pytest -s``)."""
    files, tensors = version(tmp_path, 6, megabytes=1024)
    ring, took_s = WeightRing(DEVICE), {}
    for way in ("ring", "pageable"):
        began_s = time.perf_counter()
        if way == "ring":
            for _ in ring.tensors(files, LoadDeadline(LONG_S, 1)):
                pass
        else:
            for tensor in tensors.values():
                tensor.to(DEVICE)
        torch.cuda.synchronize()
        took_s[way] = time.perf_counter() - began_s
    print(f"1 GiB onto {torch.cuda.get_device_name()}: {took_s}")
