"""Checks of a host of GPUs, from texts of its driver, of nvidia-smi and of /proc."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from dora.data.hardware import HARDWARE, hardware_of
from dora.errors import InvalidValue
from dora.host import gpu_host
from dora.host.gpu_host import HostReading, check_host, driver_number, links_of, processes_of, read_host, troubles
from dora.host.placement import Gpu
from dora.ops.doctor.gpu_checks import allowed_by, most_tokens_per_s, rates_of, slow_ones
from tests.refusals import refused

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder@U22)\nGCC: 12\n"
OLD = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\nGCC version: 12\n"
MOUNTS = "proc /proc proc rw 0 0\ntmpfs /dev/shm tmpfs rw,nosuid,size=1056767552k 0 0\n"
PROCESSES = "GPU-1, 4242, /opt/python, 3.11/bin/python, 71234\nGPU-9, 7, python, 512\n[Not Supported]\n"
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPXB\t0-47\t0
GPU1\tNV18\t X \tNODE\tSYS\t0-47\t0
GPU2\tSYS\tNODE\t X \tSYS\t48-95\t1
NIC0\tPXB\tSYS\tSYS\t X

Legend:

  X    = Self
"""
GPUS = [Gpu("NVIDIA H100 80GB HBM3", f"GPU-{number}", f"0000:{number:02x}:00.0") for number in range(2)]
SOUND = HostReading(OPEN, "/usr/bin/gcc", "/usr/include/python3.11/Python.h", MOUNTS, 1 << 40, -1, "", TOPOLOGY)
RATES = {"memory": 2600.0, "to_gpu": 52.0, "from_gpu": 53.0, "tflops": 640.0}


@pytest.mark.parametrize(("text", "number"), [(OPEN, "580.65.06"), (OLD, "535.129.03"), ("", ""), ("of no driver", "")])
def test_the_drivers_number_is_read_from_both_of_its_modules(text: str, number: str) -> None:
    assert driver_number(text) == number


def test_processes_have_names_with_commas() -> None:
    first, second = processes_of(PROCESSES)
    assert str(first) == "GPU-1 is in use by /opt/python, 3.11/bin/python (process 4242, 71234 MiB)"
    assert (second.gpu, second.pid) == ("GPU-9", 7)


def test_links_are_those_of_the_matrix() -> None:
    assert links_of(TOPOLOGY) == {(0, 1): "NV18", (0, 2): "SYS", (1, 2): "NODE"}
    assert links_of("") == {}


def test_a_sound_host_has_no_trouble() -> None:
    assert troubles(SOUND, GPUS) == []
    assert troubles(replace(SOUND, processes="GPU-9, 7, python, 512\n"), GPUS) == [], "another's GPU"
    assert troubles(replace(SOUND, processes=PROCESSES), GPUS, ours=[4242]) == []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"driver": OLD}, "535.129.03"),
        ({"compiler": ""}, "compiler"),
        ({"header": ""}, "Python.h"),
        ({"mounts": "proc /proc proc rw 0 0\n"}, "tmpfs"),
        ({"shared_bytes": 64 << 20}, "67,108,864"),
        ({"processes": PROCESSES}, "4242"),
    ],
)
def test_each_trouble_is_one_line_before_an_engine_starts(
    change: dict[str, Any], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = replace(SOUND, **change)
    (said,) = troubles(read, GPUS)
    assert word in said and "\n" not in said
    monkeypatch.setattr(gpu_host, "read_host", lambda: read)
    with refused(InvalidValue, field="workers.device", value="cuda"):
        check_host(GPUS, "cuda")


def test_a_host_without_gpus_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_host, "read_host", pytest.fail)
    assert check_host((), "cpu") is None


def test_this_machine_can_be_read() -> None:
    read = read_host()
    assert read.mounts and read.shared_bytes >= 0


def test_a_slow_gpu_differs_from_its_data_sheet_or_from_its_neighbours() -> None:
    sheet = hardware_of("NVIDIA H100 80GB HBM3")
    assert sheet is HARDWARE["h100"]
    allowed = allowed_by(sheet)
    assert slow_ones([RATES] * 8, allowed) == [] and slow_ones([RATES], {}) == []
    (said,) = slow_ones([*[RATES] * 7, {**RATES, "memory": 900.0}], allowed)
    assert "GPU 7" in said and "3350" in said
    (said,) = slow_ones([RATES, {**RATES, "tflops": 320.0}, RATES], allowed)
    assert "GPU 1" in said and "median" in said


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", ""),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 PCIe", ""),
        ("NVIDIA H100 NVL", ""),
        ("Tesla T4", ""),
    ],
)
def test_a_data_sheet_is_found_by_the_drivers_name(model: str, name: str) -> None:
    assert hardware_of(model) is HARDWARE.get(name)


def test_rates_are_measured_and_bytes_and_products_compared() -> None:
    found = rates_of(torch.device("cpu"), copied=1 << 16, side=64)
    assert set(found) == set(RATES) and found["memory"] > 0


def test_a_batch_is_bounded_by_what_it_reads() -> None:
    assert most_tokens_per_s(HARDWARE["h100"], 16e9, 0.0, 1, 0) == pytest.approx(3.35e12 / 16e9)
    assert most_tokens_per_s(HARDWARE["h100"], 16e9, 147_456, 64, 1024) == pytest.approx(8353, rel=0.01)
