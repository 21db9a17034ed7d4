"""GPUs of workers: found, inherited, chosen, kept for a trainer, and shared out; from false files of the driver."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora.errors import InvalidValue
from dora.host.placement import ORDER, VISIBLE, Gpu, Placement, gpus, log_unbound, placement_of, visible
from dora.system.numa import CPUS, MEMORY_NODES, Allowed, Locality, inherited, numbers
from tests.refusals import data_words, refused

NODES = (numbers("0-7,16-23"), numbers("8-15,24-31"))  # two sockets, whose cores have two threads each
WHOLE = Allowed(numbers("0-31"), numbers("0-1"))
EIGHT = tuple(
    Gpu("NVIDIA H100", f"GPU-{number:08x}-aaaa", f"0000:{number:02x}:00.0", Locality(number // 4, NODES[number // 4]))
    for number in range(8)
)


def uuids(placement: Placement) -> list[str]:
    return [gpu.uuid for gpu in placement.gpus]


def chosen(device: str, inherited: str | None = None, for_trainer: int = 0, may_use: Allowed = WHOLE) -> Placement:
    environment = {} if inherited is None else {VISIBLE: inherited}
    return placement_of(device, for_trainer=for_trainer, found=EIGHT, environment=environment, may_use=may_use)


def driver(folder: Path) -> tuple[Path, Path]:
    """False folders of the driver in /proc and of the bus in /sys, with eight GPUs on two NUMA nodes."""
    proc, bus = folder / "proc", folder / "sys"
    for number in (2, 0, 1, 7, 6, 5, 4, 3):
        pci = f"0000:{number * 16 + 10:02x}:00.0"
        (proc / pci.upper()).mkdir(parents=True)
        text = f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 1\nGPU UUID: \t GPU-{number}\nVideo BIOS: \t 96\n"
        (proc / pci.upper() / "information").write_text(text)
        (bus / pci).mkdir(parents=True)
        (bus / pci / "numa_node").write_text(f"{number // 4}\n")
        (bus / pci / "local_cpulist").write_text("8-15,24-31\n" if number // 4 else "0-7,16-23\n")
    return proc, bus


def test_gpus_are_those_of_the_driver_in_the_order_of_the_bus(tmp_path: Path) -> None:
    proc, bus = driver(tmp_path)
    found = gpus(proc, bus)
    assert [gpu.uuid for gpu in found] == [f"GPU-{number}" for number in range(8)]
    assert {gpu.model for gpu in found} == {"NVIDIA H100 80GB HBM3"}
    assert [gpu.place for gpu in found] == [Locality(number // 4, NODES[number // 4]) for number in range(8)]
    assert gpus(tmp_path / "none", bus) == ()


@pytest.mark.parametrize(
    ("cpus", "nodes", "first", "last"),
    [
        ("0-31", "0-1", ("0-7,16-23", "0"), ("8-15,24-31", "1")),
        ("2-9,31", "0-1", ("2-7", "0"), ("8-9,31", "1")),  # the affinity or cpuset of the service
        ("0-31", "1", ("0-7,16-23", ""), ("8-15,24-31", "1")),  # a cpuset with one node's memory
        ("0-3", "0", ("0-3", "0"), None),  # no CPU beside the last GPUs
    ],
)
def test_eight_workers_are_bound_to_what_is_next_to_their_gpus(
    cpus: str, nodes: str, first: tuple[str, str], last: tuple[str, str] | None, tmp_path: Path
) -> None:
    may_use = Allowed(numbers(cpus), numbers(nodes))
    placement = placement_of("cuda", found=gpus(*driver(tmp_path)), environment={}, may_use=may_use)
    for number in range(8):
        environment = placement.environment(number, 1)
        expected = last if number >= 4 else first
        stated = (environment[CPUS], environment[MEMORY_NODES]) if CPUS in environment else None
        assert stated == expected, number
    assert bool(placement.why_unbound()) == (last is None)


def test_a_worker_of_several_gpus_has_what_is_next_to_any_of_them() -> None:
    environment = chosen("cuda:3,4").environment(0, 2)
    assert (environment[CPUS], environment[MEMORY_NODES]) == ("0-31", "0-1")
    assert CPUS not in chosen("cuda:3,4", may_use=Allowed(numbers("0-3"), numbers("0"))).environment(0, 2)
    assert CPUS not in chosen("cpu").environment(0, 1)


def test_without_other_word_workers_may_use_what_this_process_may() -> None:
    assert placement_of("cuda", found=EIGHT, environment={}).may_use == inherited()


@pytest.mark.parametrize("damage", ["-1", "", "none", "no list", "empty list"])
def test_without_numa_information_no_worker_is_bound_and_the_log_says_it_once(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    proc, bus = driver(tmp_path)
    for device in bus.iterdir():
        if damage == "none":
            (device / "numa_node").unlink()
        elif damage == "no list":
            (device / "local_cpulist").unlink()
        elif damage == "empty list":
            (device / "local_cpulist").write_text("\n")
        else:
            (device / "numa_node").write_text(f"{damage}\n")
    placement = placement_of("cuda", found=gpus(proc, bus), environment={}, may_use=WHOLE)
    assert all(CPUS not in placement.environment(number, 1) for number in range(8))
    with caplog.at_level("INFO", "dora.service"):
        log_unbound(placement)
    (record,) = caplog.records
    assert all(gpu.pci in record.getMessage() for gpu in placement.gpus)
    assert record.getMessage().count("NUMA") == 1, "one reason for all"


def test_of_bound_workers_and_of_cpus_the_log_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "dora.service"):
        log_unbound(chosen("cuda"))
        log_unbound(chosen("cpu"))
    assert not caplog.records


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
