"""Data planes for tests: ends of one run, in this process or in several."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dora.kvtransfer.device import Part, whole
from dora.kvtransfer.listener import Listener
from dora.kvtransfer.peer import Identity, Peer, this_host
from dora.kvtransfer.plane import DataPlane, PlaneSettings
from dora.kvtransfer.transports.registry import is_installed
from dora.worker.copying.device_memory import Landings

WAIT_S = 20.0
DEVICE_BYTES = 256 << 20
SECRET = bytes(range(32))
ON_DEVICE = " between devices"  # bodies are in a device's memory at both ends; the device is a CPU
TRANSPORTS = ("shm", "tcp", "gloo", f"gloo{ON_DEVICE}", "nixl", f"nixl{ON_DEVICE}")


def name_of(transport: str) -> str:
    return transport.removesuffix(ON_DEVICE)


HERE = tuple(name for name in TRANSPORTS if is_installed(name))  # between hosts' memory


@dataclass(frozen=True)
class End:
    """One worker's plane, ``w<epoch>``."""

    plane: DataPlane
    identity: Identity
    address: str
    transports: tuple[str, ...]
    landings: Landings | None = None  # of its device

    def parts(self, arrays: Sequence[np.ndarray]) -> list[Part]:
        """A body as it leaves this end: in its device's memory, if it has one."""
        if self.landings is None:
            return [array.data for array in arrays]
        return [whole(torch.from_numpy(array)) for array in arrays]

    @property
    def peer(self) -> Peer:
        return Peer(self.identity.worker_id, self.identity.epoch, self.address, tuple(map(name_of, self.transports)))


@contextmanager
def a_plane(
    folder: Path,
    epoch: int,
    transports: tuple[str, ...] = ("shm", "tcp"),
    fingerprint: str = "f",
    host: str = "",
    secret: bytes = SECRET,
    arena_bytes: int = 0,
    landings: Landings | None = None,
    **settings: Any,
) -> Iterator[End]:
    """A plane in its own epoch. ``host``: another name makes it another host; ``arena_bytes``: it is a pool's."""
    listener = Listener("127.0.0.1")
    identity = Identity(f"w{epoch}", epoch, fingerprint, host or this_host())
    names = tuple(map(name_of, transports))
    plane = DataPlane(listener, identity, PlaneSettings(secret, folder, names, **settings), arena_bytes)
    if landings is None and names != transports:
        landings = Landings("cpu", DEVICE_BYTES, lambda size: torch.empty(size, dtype=torch.uint8))
    plane.use(landings)
    try:
        yield End(plane, identity, listener.address, transports, landings)
    finally:
        plane.close()


def until(condition: Callable[[], bool]) -> None:
    """Waits for what other threads do."""
    ends_s = time.monotonic() + WAIT_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < ends_s
        pause.wait(0.005)
