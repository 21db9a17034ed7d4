"""GPUs of workers: found, inherited, chosen, kept for a trainer, and shared out; from false files of the driver."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora.errors import InvalidValue
from dora.host.placement import ORDER, VISIBLE, Gpu, Placement, gpus, numa_node, placement_of, visible
from tests.refusals import data_words, refused

EIGHT = tuple(
    Gpu("NVIDIA H100", f"GPU-{number:08x}-aaaa", f"0000:{number:02x}:00.0", number // 4) for number in range(8)
)


def uuids(placement: Placement) -> list[str]:
    return [gpu.uuid for gpu in placement.gpus]


def chosen(device: str, inherited: str | None = None, for_trainer: int = 0) -> Placement:
    environment = {} if inherited is None else {VISIBLE: inherited}
    return placement_of(device, for_trainer=for_trainer, found=EIGHT, environment=environment)


def test_gpus_are_those_of_the_driver_in_the_order_of_the_bus(tmp_path: Path) -> None:
    for number in (2, 0, 1):
        folder = tmp_path / f"0000:{number:02x}:00.0"
        folder.mkdir()
        text = f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 1\nGPU UUID: \t GPU-{number}\nVideo BIOS: \t 96\n"
        (folder / "information").write_text(text)
    found = gpus(tmp_path)
    assert [gpu.uuid for gpu in found] == ["GPU-0", "GPU-1", "GPU-2"]
    assert {gpu.model for gpu in found} == {"NVIDIA H100 80GB HBM3"}
    assert gpus(tmp_path / "none") == ()


def test_the_numa_node_is_the_bus_devices(tmp_path: Path) -> None:
    (tmp_path / "0000:17:00.0").mkdir()
    (tmp_path / "0000:17:00.0" / "numa_node").write_text("1\n")
    assert numa_node("0000:17:00.0", tmp_path) == 1 and numa_node("0000:18:00.0", tmp_path) == -1


def test_eight_workers_on_eight_gpus_have_one_each() -> None:
    placement = chosen("cuda")
    seen = [placement.environment(number, 1) for number in range(8)]
    assert [each[VISIBLE] for each in seen] == [gpu.uuid for gpu in EIGHT]
    assert all(each[ORDER] == "PCI_BUS_ID" for each in seen)
    assert chosen("cpu").environment(3, 1) == {VISIBLE: ""} and chosen("cpu").kind == "cpu"


def test_ranks_of_a_worker_have_neighbours() -> None:
    assert [chosen("cuda").environment(number, 4)[VISIBLE].split(",") for number in range(2)] == [
        [gpu.uuid for gpu in EIGHT[:4]],
        [gpu.uuid for gpu in EIGHT[4:]],
    ]


@pytest.mark.parametrize(
    ("device", "inherited", "numbers"),
    [
        ("cuda", "3,5", [3, 5]),  # a container, or Slurm
        ("cuda", "GPU-00000007-aaaa,GPU-00000002", [7, 2]),
        ("cuda:1", "3,5", [5]),  # counted in what is visible
        ("cuda:GPU-00000004", None, [4]),
        ("", "6", [6]),
        ("cuda:7,0", None, [7, 0]),
    ],
)
def test_gpus_are_chosen_among_the_visible_ones(device: str, inherited: str | None, numbers: list[int]) -> None:
    assert uuids(chosen(device, inherited)) == [EIGHT[number].uuid for number in numbers]


@pytest.mark.parametrize("inherited", ["", " ", None])
def test_without_a_gpu_an_empty_device_is_the_cpu(inherited: str | None) -> None:
    found = () if inherited is None else EIGHT
    environment = {} if inherited is None else {VISIBLE: inherited}
    assert placement_of("", found=found, environment=environment).kind == "cpu"
    with refused(InvalidValue, field="workers.device", value="cuda"):
        placement_of("cuda", found=found, environment=environment)


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:a", "cuda:0,0", "cuda:8", "cuda:-1", "cpu:0", "cuda:GPU-"])
def test_another_device_is_refused(device: str) -> None:
    with refused(InvalidValue, field="workers.device", value=device):
        chosen(device)


def test_a_visible_gpu_that_is_not_there_is_refused() -> None:
    with refused(InvalidValue, field=VISIBLE, value="0,9", names=data_words("'9'")):
        visible(EIGHT, {VISIBLE: "0,9"})


def test_gpus_of_a_trainer_are_kept() -> None:
    placement = chosen("cuda", for_trainer=2)
    assert uuids(placement) == [gpu.uuid for gpu in EIGHT[:6]] and placement.all_gpus == EIGHT
    with refused(InvalidValue, field="workers.gpus_for_trainer", value=8):
        chosen("cuda", for_trainer=8)
    with refused(InvalidValue, field="workers.gpus_for_trainer", value=2):
        chosen("cpu", for_trainer=2)
    with refused(InvalidValue, field="--gpus-for-trainer", value=2):
        placement_of("", for_trainer=2, found=(), field="--device")


@given(workers=st.integers(0, 20), ranks=st.integers(1, 9), for_trainer=st.integers(0, 7))
def test_no_gpu_has_two_ranks_and_too_many_workers_are_refused(workers: int, ranks: int, for_trainer: int) -> None:
    placement = chosen("cuda", for_trainer=for_trainer)
    if workers * ranks > 8 - for_trainer:
        with refused(InvalidValue, field="workers", value=workers, names=data_words(str(8 - for_trainer))):
            placement.check(workers, ranks)
        return
    placement.check(workers, ranks)
    taken = [uuid for number in range(workers) for uuid in placement.environment(number, ranks)[VISIBLE].split(",")]
    assert len(set(taken)) == len(taken) == workers * ranks
