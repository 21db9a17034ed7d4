"""The registry of the data plane's transports. A new one needs its two halves (``transport``) and an entry here.

``kv.transports`` names those that a service uses, in order of preference.
"""

import importlib.util
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dora.errors import InvalidValue, one_of
from dora.kvtransfer.transports.arena import Arena
from dora.kvtransfer.transports.nixl_pair import NixlReceiver, NixlSender, nixl_package
from dora.kvtransfer.transports.segments import SegmentPool
from dora.kvtransfer.transports.shm import ShmArenaReceiver, ShmReceiver, ShmSender
from dora.kvtransfer.transports.tcp import TcpReceiver, TcpSender
from dora.kvtransfer.transports.torch_pair import TorchReceiver, TorchSender
from dora.kvtransfer.transports.transport import Receiver, Sender
from dora.kvtransfer.wire import Stream


@dataclass(frozen=True, slots=True)
class Resources:
    """The parts of a data plane that transports use. ``owner`` is the other end's epoch, which names its segments."""

    owner: str
    folder: Path
    segments: SegmentPool
    arena: Arena | None
    helpers: Executor
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Transport:
    """``available`` says whether this process could use the transport, determined without an import."""

    sender: Callable[[Resources, Stream], Sender]
    receiver: Callable[[Resources, Stream], Receiver]
    available: Callable[[], bool] = lambda: True


def _shm_receiver(resources: Resources, _stream: Stream) -> Receiver:
    if resources.arena is not None:
        return ShmArenaReceiver(resources.arena)
    return ShmReceiver(resources.folder, resources.owner)


def _torch(backend: str, available: Callable[[], bool]) -> Transport:
    return Transport(
        lambda resources, stream: TorchSender(backend, stream, resources.timeout_s, resources.helpers),
        lambda resources, stream: TorchReceiver(backend, stream, resources.timeout_s),
        available,
    )


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def _has_nvidia_gpu() -> bool:
    return Path("/dev/nvidiactl").exists() and _has_torch()


TRANSPORTS: Final[dict[str, Transport]] = {
    "shm": Transport(lambda found, _stream: ShmSender(found.segments, found.folder, found.owner), _shm_receiver),
    "tcp": Transport(
        lambda resources, _stream: TcpSender(resources.helpers),
        lambda resources, _stream: TcpReceiver(resources.helpers),
    ),
    "gloo": _torch("gloo", _has_torch),
    "nccl": _torch("nccl", _has_nvidia_gpu),
    "nixl": Transport(
        lambda resources, _stream: NixlSender(resources.timeout_s),
        lambda _resources, _stream: NixlReceiver(),
        lambda: bool(nixl_package()),
    ),
}


def is_installed(name: str) -> bool:
    return name in TRANSPORTS and TRANSPORTS[name].available()


def installed() -> tuple[str, ...]:
    return tuple(name for name in TRANSPORTS if is_installed(name))


def check_transports(names: str) -> None:
    """Raises InvalidValue if ``kv.transports``, a comma-separated list, has an unknown name."""
    for name in names.split(","):
        if name not in TRANSPORTS:
            raise InvalidValue("kv.transports", names, f"comma-separated names, each {one_of(name, TRANSPORTS)}")
