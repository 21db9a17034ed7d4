"""The protocol of launchers, which run the worker processes of a host.

Two exist: ``processes.Processes`` runs processes on its own machine, and the service's end of an agent runs them on
another host (``dora/orchestrator/hosts/remote.py``). A launcher for Ray, Kubernetes or Slurm has the same four methods.
"""

import asyncio
import re
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass
from typing import Any, Final, Protocol

from dora.errors import DoraError, InvalidValue

WORKERS_MAX: Final = 256  # of one host
HOST_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")
ZONE: Final = re.compile(r"[A-Za-z0-9._/-]{0,64}")
LOCAL: Final = "local"  # the service's own host


class WorkerStartError(DoraError):
    """A worker process ended before its first message."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """The changes that ``Launcher.scale`` started. The caller empties each ``surplus`` worker, then stops it."""

    started: tuple[str, ...]
    surplus: tuple[str, ...]


class Launcher(Protocol):
    """The workers of one host, by id. No method waits: results show when workers join the service or do not.

    A worker that ends is restarted as often as ``workers.restarts`` allows.
    """

    @property
    def workers(self) -> Collection[str]:
        """The wanted workers, whether or not their processes run at the moment."""

    @property
    def failed(self) -> "asyncio.Future[None]":
        """Fails with WorkerStartError once no worker may be restarted."""

    def start(self, worker_id: str) -> None:
        """Adds a worker. No effect if it exists."""

    def stop(self, worker_id: str, *, again: bool = False) -> None:
        """Ends a worker without a restart. With ``again``, the worker cannot be trusted: it is killed and restarted. An
        id that this launcher did not start is ignored.
        """

    def scale(self, workers: int) -> Scaled:
        """Sets the number of workers. Raises InvalidValue above the limit of a host."""


class OwnLauncher(Launcher, Protocol):
    """The launcher of the service's own workers (``launchers.py``). It also starts and ends with the service."""

    def names(self, workers: int) -> Set[str]:
        """Returns the ids of its pools and of ``workers`` workers."""

    def adopt(self, living: Mapping[str, Any], workers: int) -> None:
        """Continues processes of an earlier incarnation, by name. Called before ``begin``."""

    async def begin(self, workers: int) -> None:
        """Starts processes that import their libraries, before their commands are known."""

    def open(self) -> None:
        """Starts the pools; workers may be started from now on."""

    def early_death(self) -> str | None:
        """Returns the reason for which a worker ends again and again at its start, or None."""

    async def close(self) -> None:
        """Ends all processes. May be called again."""


def scaled(prefix: str, present: Collection[str], workers: int) -> Scaled:
    """Returns the changes from ``present`` to ``workers`` workers: the lowest free numbers start, the highest leave."""
    if not 0 <= workers <= WORKERS_MAX:
        raise InvalidValue("workers", workers, f"0 to {WORKERS_MAX} on one host")
    ordered = sorted(present, key=lambda name: number_of(prefix, name))
    surplus = tuple(ordered[workers:])
    free = (name for index in range(WORKERS_MAX) if (name := worker_name(prefix, index)) not in present)
    started = tuple(next(free) for _ in range(workers - len(present)))
    return Scaled(started, surplus)


def prefix_of(host: str) -> str:
    """Returns the prefix of a host's worker ids. The service's own workers have none: w0, w1, ..."""
    return "" if host == LOCAL else f"{host}-"


def worker_name(prefix: str, index: int) -> str:
    return f"{prefix}w{index}"


def number_of(prefix: str, worker_id: str) -> int:
    """Returns the number of a worker: the inverse of ``worker_name``."""
    return int(worker_id.removeprefix(f"{prefix}w"))


def check_host_name(name: str) -> str:
    """Returns ``name``. Raises InvalidValue if no id can start with it or the service reserves it."""
    if not HOST_NAME.fullmatch(name) or name == LOCAL:
        allowed = f"1 to 32 letters, digits, '.', '_' or '-', and not {LOCAL!r}, which is the service's own"
        raise InvalidValue("name", name, allowed)
    return name


def check_zone(zone: str) -> str:
    """Returns ``zone``, a host's zone, or the service's if it is empty. Raises InvalidValue for a malformed name."""
    if not ZONE.fullmatch(zone):
        raise InvalidValue("zone", zone[:80], "at most 64 letters, digits, '.', '_', '/' or '-'")
    return zone
