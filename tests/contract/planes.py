"""Data planes for tests: ends of one run, in this process or in several."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dora.kvtransfer.listener import Listener
from dora.kvtransfer.peer import Identity, Peer, this_host
from dora.kvtransfer.plane import DataPlane, PlaneSettings
from dora.kvtransfer.registry import is_installed

WAIT_S = 20.0
SECRET = bytes(range(32))
TRANSPORTS = ("shm", "tcp", "gloo", "nixl")
HERE = tuple(name for name in TRANSPORTS if is_installed(name))


@dataclass(frozen=True)
class End:
    """One worker's plane, ``w<epoch>``."""

    plane: DataPlane
    identity: Identity
    address: str
    transports: tuple[str, ...]

    @property
    def peer(self) -> Peer:
        return Peer(self.identity.worker_id, self.identity.epoch, self.address, self.transports)


@contextmanager
def a_plane(
    folder: Path,
    epoch: int,
    transports: tuple[str, ...] = ("shm", "tcp"),
    fingerprint: str = "f",
    host: str = "",
    secret: bytes = SECRET,
    arena_bytes: int = 0,
    **settings: Any,
) -> Iterator[End]:
    """A plane in its own epoch. ``host``: another name makes it another host; ``arena_bytes``: it is a pool's."""
    listener = Listener("127.0.0.1")
    identity = Identity(f"w{epoch}", epoch, fingerprint, host or this_host())
    plane = DataPlane(listener, identity, PlaneSettings(secret, folder, transports, **settings), arena_bytes)
    try:
        yield End(plane, identity, listener.address, transports)
    finally:
        plane.close()


def until(condition: Callable[[], bool]) -> None:
    """Waits for what other threads do."""
    ends_s = time.monotonic() + WAIT_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < ends_s
        pause.wait(0.005)
