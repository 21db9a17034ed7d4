"""The capacity of this machine."""

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from dora.host.placement import gpus
from dora.rpc import dora_pb2 as pb


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
        gpus=tuple(gpu.model for gpu in gpus()),
    )


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
