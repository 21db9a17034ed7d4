"""Tracks the versions that are local to each host. An unknown host shares the service's own store and has all versions,
except those that were missing there.
"""

from dora.core import events as on
from dora.core.fleet.worker import Worker
from dora.core.state import State


def joined(state: State, event: on.HostJoined) -> None:
    state.arrived[event.host] = set(event.versions)


def lost(state: State, event: on.HostLost) -> bool:
    """Returns whether the host was known."""
    return state.arrived.pop(event.host, None) is not None


def arrived(state: State, event: on.VersionArrived) -> bool:
    """Lets workers that wait for the version load it. Returns whether the host is known."""
    is_own = not event.host
    versions = state.arrived.get(event.host)
    if versions is None and not is_own:
        return False
    if not state.keeps_weights(event.version):
        return True  # it was retired on its way
    if versions is not None:
        versions.add(event.version)
    state.missing -= {event.version} if is_own else set()
    for worker in state.workers.values():
        if worker.host == event.host or (is_own and worker.host not in state.arrived):
            state.rehosted(worker)
    return True


def missed(state: State, host: str, version: int) -> None:
    """Notes that a worker has not found the version on its host: no worker loads it there until it arrives again.

    Version 0, the model itself, does not travel, so a missing version 0 is the worker's own fault.
    """
    versions = state.arrived.get(host)
    if versions is not None and version:
        versions.discard(version)
    elif version and state.keeps_weights(version):
        state.missing.add(version)


def forgotten(state: State, version: int) -> None:
    """Forgets which hosts hold the version: it has retired or was published again."""
    for versions in state.arrived.values():
        versions.discard(version)
    state.missing.discard(version)


def vanished(state: State, version: int) -> None:
    """Notes that no host has the version, not even the service's own; a host that finds it again has it alone."""
    forgotten(state, version)
    state.missing.add(version)


def is_within_reach(state: State, worker: Worker) -> bool:
    """Returns whether the worker's host holds the version that the worker loads next."""
    return holds(state, worker.host, worker.target)


def holds(state: State, host: str, version: int) -> bool:
    versions = state.arrived.get(host)
    return version not in state.missing if versions is None else version in versions
