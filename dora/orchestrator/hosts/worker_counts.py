"""The workers that each host runs, as operators ask for: hosts grow, shrink and are drained."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from dora.core import events as on
from dora.core.rules.notice import is_emptied
from dora.core.state import State
from dora.errors import Conflict, InvalidValue, NotFound, one_of
from dora.host.launcher import WORKERS_MAX, Launcher
from dora.orchestrator.hosts.remote import HostSession
from dora.orchestrator.rollout.streams import DRAINED
from dora.system.awake import awake_s

CAUSES: Final = ("notice", "operator", "lease", "connection", "fault")  # of hosts that left or are lost
DRAINS: Final = {"notice": "preempted by notice", "operator": "drained by an operator"}


@dataclass(slots=True)
class Host:
    """Describes one machine. The service's own has no ``session``."""

    name: str
    launcher: Launcher
    session: HostSession | None = None
    draining: bool = False
    deadline_s: float = 0.0  # by ``awake_s``: the end of a draining host; 0: it has none
    cause: str = ""  # one of CAUSES: why it drains
    reason: str = ""  # the same for operators
    leaving: set[str] = field(default_factory=set)  # workers that are drained, to be stopped afterwards

    @property
    def is_failed(self) -> bool:
        return self.launcher.failed.done() and not self.launcher.failed.cancelled()

    @property
    def state(self) -> str:
        if self.draining:
            return "draining" if self.launcher.workers else "drained"
        return "failed" if self.is_failed else "ready"

    @property
    def active(self) -> list[str]:
        return [name for name in self.launcher.workers if name not in self.leaving]


class WorkerCounts:
    """Changes the workers of the connected ``hosts``. ``post`` hands an event to the core, whose ``state`` is read."""

    def __init__(self, hosts: Mapping[str, Host], state: State, post: Callable[[on.Event], None]) -> None:
        self._hosts = hosts
        self._state = state
        self._post = post
        self.scaled: Callable[[int], None] = lambda workers: None  # gets the new number of the service's own host

    def drain(self, name: str, cause: str, within_s: float = 0.0) -> int:
        """Drains all workers of a host, which leaves afterwards, or ``within_s`` from now at the latest if that is not
        0. Returns their number. Raises NotFound, InvalidValue, and Conflict unless there is a deadline.
        """
        host, reason = self._named(name), DRAINS[cause] + (f", {within_s:g} s" if within_s else "")
        if within_s and host.session is None:
            raise InvalidValue("--within", within_s, f"a host that has joined: {name} is the service's own")
        if host.draining and not within_s:
            raise Conflict("host", name, "a host that is not draining", why="is draining already")
        active = host.active
        if within_s:
            host.leaving.update(name for name in active if name in self._state.workers)
            self._post(on.HostNoticed(name, within_s, reason))
            if not host.deadline_s or awake_s() + within_s < host.deadline_s:
                host.deadline_s, host.cause, host.reason = awake_s() + within_s, cause, reason
        else:
            self._check_left_over(host.active)
            host.cause, host.reason = cause, reason
        host.draining = True
        for worker_id in active:
            self._empty(host, worker_id)
        self._tell(host)
        self.end_if_drained(host)
        return len(active)

    def drain_worker(self, worker_id: str) -> None:
        """Drains one worker, also one that no launcher started. Raises NotFound, Conflict."""
        self._post(on.DrainRequested(worker_id))
        for host in self._hosts.values():
            if worker_id in host.launcher.workers:
                host.leaving.add(worker_id)
                self._tell(host)

    def scale(self, workers: int, name: str) -> tuple[list[str], list[str]]:
        """Brings a host, or all together, to so many workers. Returns the workers that start and those that are
        drained.
        """
        hosts = [self._named(name)] if name else [host for host in self._hosts.values() if not host.draining]
        # checked before the workers are distributed one by one
        if hosts and not 0 <= workers <= WORKERS_MAX * len(hosts):
            allowed = f"0 to {WORKERS_MAX} on one host, {WORKERS_MAX * len(hosts)} on {len(hosts)}"
            raise InvalidValue("workers", workers, allowed)
        counts = {host.name: len(host.active) for host in hosts}
        targets = {name: workers} if name else distributor(counts, workers)
        changed = [host for host in hosts if targets[host.name] != counts[host.name] or host.draining]
        for host in changed:
            if host.deadline_s:
                raise Conflict("host", host.name, "a host that stays", why=f"leaves ({host.reason})")
            if host.leaving:
                why = f"is changing: {', '.join(sorted(host.leaving))} are being drained"
                raise Conflict("host", host.name, "a host with no draining workers", why=why)
        surplus = [each for host in changed for each in host.active[max(0, targets[host.name]) :]]
        if surplus:
            self._check_left_over(surplus)
        started: list[str] = []
        emptied: list[str] = []
        for host in changed:
            change = host.launcher.scale(targets[host.name])
            host.draining, host.cause, host.reason = False, "", ""
            started.extend(change.started)
            for worker_id in change.surplus:
                emptied.append(worker_id)
                self._empty(host, worker_id)
            self._tell(host)
        return started, emptied

    def _tell(self, host: Host) -> None:
        if host.session is None:
            self.scaled(len(host.active))

    def _empty(self, host: Host, worker_id: str) -> None:
        """Drains a worker and stops it afterwards; one that has not joined is stopped at once."""
        worker = self._state.workers.get(worker_id)
        if worker is None:
            host.launcher.stop(worker_id)
            return
        host.leaving.add(worker_id)
        if not worker.draining:
            self._post(on.DrainRequested(worker_id))

    def _check_left_over(self, leaving: Collection[str]) -> None:
        working = {name for name, worker in self._state.workers.items() if not worker.draining}
        if working and not working - set(leaving):
            allowed = "only some of the workers, so that others can take over their requests"
            raise Conflict("workers", ", ".join(sorted(leaving)), allowed, why="are the last working ones")

    def _named(self, name: str) -> Host:
        if name not in self._hosts:
            raise NotFound("host", name, one_of(name, list(self._hosts)))
        return self._hosts[name]

    def is_leaving(self, worker_id: str) -> bool:
        """Returns whether the worker is being drained, to be stopped afterwards."""
        return any(worker_id in host.leaving for host in self._hosts.values())

    def release(self, worker_id: str) -> None:
        """Ends the process of a drained worker; with the last one, a drained host leaves."""
        for host in list(self._hosts.values()):
            if worker_id in host.launcher.workers:
                host.launcher.stop(worker_id)
                host.leaving.discard(worker_id)
                self.end_if_drained(host)

    def end_if_drained(self, host: Host) -> None:
        """Lets a draining host leave that has no worker. One with a deadline first empties its pool."""
        if not host.draining or host.launcher.workers or host.session is None:
            return
        if not host.deadline_s or is_emptied(self._state, host.name):
            host.session.leave(DRAINED)


def distributor(counts: dict[str, int], total: int) -> dict[str, int]:
    """Brings ``counts`` of workers by host to ``total``: the host with the fewest gains, the one with the most loses.

    Raises InvalidValue if there is no host.
    """
    if not counts:
        raise InvalidValue("workers", total, "a number for hosts that are connected and not draining: there is none")
    found = dict(counts)
    while (left := total - sum(found.values())) != 0:
        name = (
            min(found, key=lambda name: (found[name], name))
            if left > 0
            else max(found, key=lambda name: (found[name], name))
        )
        found[name] += 1 if left > 0 else -1
    return found
