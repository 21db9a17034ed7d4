"""The capacity of this machine."""

import os
from dataclasses import dataclass
from pathlib import Path

from dora.host.placement import gpus
from dora.rpc import dora_pb2 as pb
from dora.system.memory import available_bytes, memory_bytes


@dataclass(frozen=True, slots=True)
class Capacity:
    """The capacity of one machine, its memory within the limits of this process's control groups.

    ``store_free_bytes`` is for versions: the lesser of the free bytes of their folder and of the memory. ``gpus`` has
    the model of each.
    """

    cores: int
    memory_bytes: int
    memory_free_bytes: int
    store_free_bytes: int
    gpus: tuple[str, ...] = ()


def capacity_of(folder: Path) -> Capacity:
    """Measures the capacity. ``folder`` is the store of versions, maybe in memory; a missing one has no free bytes."""
    free_bytes = available_bytes()
    try:
        room = os.statvfs(folder)
        store_free_bytes = min(room.f_bavail * room.f_frsize, free_bytes)
    except OSError:
        store_free_bytes = 0
    return Capacity(
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=memory_bytes(),
        memory_free_bytes=free_bytes,
        store_free_bytes=store_free_bytes,
        gpus=tuple(gpu.model for gpu in gpus()),
    )


def capacity_to_wire(folder: Path) -> pb.HostCapacity:
    found = capacity_of(folder)
    return pb.HostCapacity(
        cores=found.cores,
        memory_bytes=found.memory_bytes,
        memory_free_bytes=found.memory_free_bytes,
        store_free_bytes=found.store_free_bytes,
        gpus=found.gpus,
    )
