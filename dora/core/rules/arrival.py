"""Which versions are within reach of a host's workers. A host that is not known here shares the service's own store,
and has all: until one is missing there."""

from dora.core import events as on
from dora.core.fleet.worker import Worker
from dora.core.state import State


def joined(state: State, event: on.HostJoined) -> None:
    """A host with a store of its own."""
    state.arrived[event.host] = set(event.versions)


def lost(state: State, event: on.HostLost) -> bool:
    """Returns whether it was known."""
    return state.arrived.pop(event.host, None) is not None


def arrived(state: State, event: on.VersionArrived) -> bool:
    """Workers that wait for the version may load it. Returns whether the host is known."""
    is_own = not event.host
    held = state.arrived.get(event.host)
    if held is None and not is_own:
        return False
    if event.version < state.window.oldest_kept:
        return True  # it was let go while it was on its way
    if held is not None:
        held.add(event.version)
    state.missing -= {event.version} if is_own else set()
    for worker in state.workers.values():
        if worker.host == event.host or (is_own and worker.host not in state.arrived):
            state.rehosted(worker)
    return True


def missed(state: State, host: str, version: int) -> None:
    """A worker has not found the version on its host: until it has arrived there again, nobody loads it there.

    Version 0, the model itself, does not travel: that is the worker's own trouble.
    """
    held = state.arrived.get(host)
    if held is not None and version:
        held.discard(version)
    elif version >= max(1, state.window.oldest_kept):
        state.missing.add(version)


def forgotten(state: State, version: int) -> None:
    """What hosts hold of it is this version no more: it has retired, or was published anew."""
    for held in state.arrived.values():
        held.discard(version)
    state.missing.discard(version)


def vanished(state: State, version: int) -> None:
    """No host has it any more, the service's own neither: wherever it is found, it has arrived there alone."""
    forgotten(state, version)
    state.missing.add(version)


def is_within_reach(state: State, worker: Worker) -> bool:
    """Whether the worker's host holds the version that it is to load."""
    held = state.arrived.get(worker.host)
    return worker.target not in state.missing if held is None else worker.target in held
