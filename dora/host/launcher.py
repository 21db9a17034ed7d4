"""Who runs the worker processes of one host: the seam between a service and whatever starts processes somewhere.

Two launchers exist: ``processes.Processes``, on the machine that it is on, and the service's end of an agent elsewhere
(``dora/orchestrator/hosts/remote.py``). One for Ray, Kubernetes or Slurm would have the same four words.
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
    """A worker process ended before it ever answered."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """What ``Launcher.scale`` began. ``surplus`` are still there: whoever asked empties each, then stops it."""

    started: tuple[str, ...]
    surplus: tuple[str, ...]


class Launcher(Protocol):
    """The workers of one host, by id. No method waits; what follows shows when workers join the service, or do not.

    A worker that ends is started again, as often as ``workers.restarts`` allows.
    """

    @property
    def workers(self) -> Collection[str]:
        """Those that are to be there, whether or not their processes run just now."""

    @property
    def failed(self) -> "asyncio.Future[None]":
        """Fails with WorkerStartError once no worker is left that may be started again."""

    def start(self, worker_id: str) -> None:
        """A worker is to be there from now on. Nothing happens where it is."""

    def stop(self, worker_id: str, *, again: bool = False) -> None:
        """Ends a worker, which is not started again. ``again``: it is not to be trusted, so it is killed and started
        again. An id that this launcher did not start is ignored."""

    def scale(self, workers: int) -> Scaled:
        """So many workers are to be there. Raises InvalidValue for more than a host may have."""


class OwnLauncher(Launcher, Protocol):
    """The launcher of the service's own workers (``launchers.py``). It also starts and ends with the service."""

    def names(self, workers: int) -> Set[str]:
        """Ids of its pools, and of so many workers."""

    def adopt(self, living: Mapping[str, Any], workers: int) -> None:
        """Continues processes of an earlier incarnation, by name. Called before ``begin``."""

    async def begin(self, workers: int) -> None:
        """Starts processes that import their libraries, before their commands are known."""

    def open(self) -> None:
        """Starts the pools; workers may be started from now on."""

    def early_death(self) -> str | None:
        """The reason for which a worker ends again and again at its start; None: there is none."""

    async def close(self) -> None:
        """Ends all processes. May be called again."""


def scaled(prefix: str, present: Collection[str], workers: int) -> Scaled:
    """What takes a host with the workers ``present`` to so many: the lowest free numbers begin, the highest leave."""
    if not 0 <= workers <= WORKERS_MAX:
        raise InvalidValue("workers", workers, f"0 to {WORKERS_MAX} on one host")
    ordered = sorted(present, key=lambda name: number_of(prefix, name))
    surplus = tuple(ordered[workers:])
    free = (name for index in range(WORKERS_MAX) if (name := worker_name(prefix, index)) not in present)
    started = tuple(next(free) for _ in range(workers - len(present)))
    return Scaled(started, surplus)


def prefix_of(host: str) -> str:
    """With what the ids of a host's workers begin. The service's own are called as they always were: w0, w1, ..."""
    return "" if host == LOCAL else f"{host}-"


def worker_name(prefix: str, index: int) -> str:
    return f"{prefix}w{index}"


def number_of(prefix: str, worker_id: str) -> int:
    """The inverse of ``worker_name``."""
    return int(worker_id.removeprefix(f"{prefix}w"))


def check_host_name(name: str) -> str:
    """``name`` itself. Raises InvalidValue for one that no id could begin with, or that the service has for itself."""
    if not HOST_NAME.fullmatch(name) or name == LOCAL:
        allowed = f"1 to 32 letters, digits, '.', '_' or '-', and not {LOCAL!r}, which is the service's own"
        raise InvalidValue("name", name, allowed)
    return name


def check_zone(zone: str) -> str:
    """``place`` itself: where a host is; empty: where the service is. Raises InvalidValue for what is no name."""
    if not ZONE.fullmatch(zone):
        raise InvalidValue("place", zone[:80], "at most 64 letters, digits, '.', '_', '/' or '-'")
    return zone
