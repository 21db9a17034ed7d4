"""The capacity of this machine, and the assignment of its GPUs to workers."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from dora.errors import InvalidValue
from dora.host.launcher import number_of
from dora.rpc import dora_pb2 as pb

_GPUS: Final = Path("/proc/driver/nvidia/gpus")
_DEVICE: Final = re.compile(r"cpu|cuda(:\d+(,\d+)*)?")
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Capacity:
    """The capacity of one machine. ``store_free_bytes``: for versions, the lesser of the free bytes of their folder and
    of the memory. ``gpus``: the model of each.
    """

    cores: int
    memory_bytes: int
    memory_free_bytes: int
    store_free_bytes: int
    gpus: tuple[str, ...] = ()


def capacity_of(folder: Path) -> Capacity:
    """Measures the capacity. ``folder``: the store of versions, whose file system may be in memory. A missing folder
    has no free bytes.
    """
    memory = psutil.virtual_memory()
    try:
        room = os.statvfs(folder)
        store_free_bytes = min(room.f_bavail * room.f_frsize, memory.available)
    except OSError:
        store_free_bytes = 0
    return Capacity(
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=memory.total,
        memory_free_bytes=memory.available,
        store_free_bytes=store_free_bytes,
        gpus=gpus(),
    )


def gpus() -> tuple[str, ...]:
    """Returns the NVIDIA GPUs in the driver's order."""
    try:
        folders = sorted(_GPUS.iterdir())
        texts = [(folder / "information").read_text(encoding="utf-8", errors="replace") for folder in folders]
    except OSError:
        return ()
    found = (re.search(r"^Model:\s*(.+)$", text, re.MULTILINE) for text in texts)
    return tuple(match.group(1).strip() if match else "GPU" for match in found)


def chosen_device(device: str, found: Sequence[str]) -> str:
    """Resolves ``device``: ``cpu``, ``cuda`` (all GPUs), ``cuda:0,2``; empty: what the machine has. Raises InvalidValue
    for other texts and for missing GPUs.
    """
    if not device:
        return "cuda" if found else "cpu"
    numbers = [int(number) for number in device.partition(":")[2].split(",") if number.isdigit()]
    if not _DEVICE.fullmatch(device) or len(set(numbers)) < len(numbers):
        raise InvalidValue("--device", device, "cpu, cuda, or cuda: with the numbers of GPUs, such as cuda:0,1")
    if device != "cpu" and (not found or any(number >= len(found) for number in numbers)):
        allowed = f"cpu, or GPUs of 0 to {len(found) - 1}" if found else "cpu: this machine has no GPU"
        raise InvalidValue("--device", device, allowed)
    return device


def visible_gpus(device: str, count: int, prefix: str, worker_id: str, ranks: int) -> dict[str, str]:
    """Returns the environment that gives a worker one GPU for each rank. GPUs are assigned in the order of worker
    numbers, starting again at the first when all are used.
    """
    if device == "cpu":
        return {VISIBLE: ""}
    given = device.partition(":")[2]
    numbers = given.split(",") if given else [str(number) for number in range(count)]
    first = number_of(prefix, worker_id) * ranks
    return {VISIBLE: ",".join(numbers[(first + rank) % len(numbers)] for rank in range(ranks))}


def capacity_to_wire(folder: Path) -> pb.HostCapacity:
    """Returns the result of ``capacity_of`` as a message."""
    found = capacity_of(folder)
    return pb.HostCapacity(
        cores=found.cores,
        memory_bytes=found.memory_bytes,
        memory_free_bytes=found.memory_free_bytes,
        store_free_bytes=found.store_free_bytes,
        gpus=found.gpus,
    )
