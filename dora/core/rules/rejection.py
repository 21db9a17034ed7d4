"""Rejects bad publications: weights that the first workers cannot reproduce are published again.

    published ──one loads it well──▶ proven: a later refusal is the worker's own fault (membership.py)
        └──one refuses its weights──▶ suspect: one other worker tries it, nobody else
                                        ├──it loads it well──▶ proven
                                        └──it refuses too──▶ rejected ──published again──▶ published

Two distinct workers reject a version, or all working ones if they have refused it in their present epochs. A worker
that has refused it loads the next plan's version: the newest that is not quarantined, or another that has work. Version
0 is the model itself: it cannot be published again, so a refusal of it is the worker's fault.

A version may also be *unavailable*: no host has its weights. It is quarantined, and rejected as long as it is needed:
as the newest one, or for unfinished responses. It is no longer requested once their groups are cancelled.
"""

from collections.abc import Sequence
from typing import Final

from dora.core import commands as do
from dora.core import events as on
from dora.core.fleet.worker import Worker
from dora.core.rules import arrival
from dora.core.state import Refusal, State, SuspectVersion
from dora.errors import VersionRejected

WITNESSES: Final = 2  # distinct workers whose refusal rejects a version


def is_unproven(state: State, version: int) -> bool:
    """Returns whether a refusal counts against the version, not against the worker."""
    return version > 0 and version not in state.proven


def may_load(state: State, worker: Worker) -> bool:
    """Returns whether the worker may load its target now: a suspect version only if it is the one to try it."""
    return worker.target not in state.window.quarantined or tries(state, worker)


def tries(state: State, worker: Worker) -> bool:
    """Returns whether this worker is the one to try a suspect version."""
    return any(suspect.second == worker.worker_id for suspect in state.suspects.values())


def check_none(state: State) -> None:
    """Raises VersionRejected for the oldest version that must be published again."""
    if state.rejected:
        rejection = state.rejected[min(state.rejected)]
        raise VersionRejected(rejection.version, rejection.reason, rejection.worker_ids, rejection.canary_difference)


def proves(state: State, version: int) -> None:
    """Marks a version that a worker has loaded well as proven."""
    state.proven.add(version)
    if state.suspects.pop(version, None) is not None:
        _release(state, version)


def refused(state: State, worker: Worker, version: int, event: on.CommandDone) -> None:
    """Notes a worker's refusal of an unproven version's weights; ``judge`` draws the consequences.

    A version that was retired during the load does not become suspect: the worker gets another one.
    """
    if version >= state.window.oldest_kept:
        suspect = state.suspects.setdefault(version, SuspectVersion())
        suspect.refusals[worker.worker_id] = Refusal(worker.epoch, event.error, event.canary_difference)
        state.window.quarantine(version)
    state.replan = True


def judge(state: State) -> None:
    """Rejects versions that enough workers have refused, and assigns a worker to try each other suspect version."""
    working = sorted((w for w in state.workers.values() if not w.draining), key=lambda w: w.index)
    for version, suspect in sorted(state.suspects.items()):
        if version < state.window.oldest_kept:  # later versions have moved the window past it
            del state.suspects[version]
            _release(state, version)
        elif len(suspect.refusals) >= WITNESSES or (working and all(_has_refused(suspect, w) for w in working)):
            _reject(state, version, suspect)
    for version, suspect in sorted(state.suspects.items()):  # a worker that tried a settled version may try another one
        _ask_another(state, version, suspect, working)


def unavailable(state: State, event: on.VersionUnavailable) -> bool:
    """Notes that nobody can load a version. Returns whether that is new."""
    version, window = event.version, state.window
    if version in state.rejected or version in state.unavailable:
        return False
    if not max(1, window.oldest_kept) <= version <= window.newest:
        return False
    state.suspects.pop(version, None)
    state.unavailable[version] = event.reason
    window.quarantine(version)
    arrival.vanished(state, version)
    state.replan = True
    return True


def has_to_come(state: State, version: int) -> bool:
    """Returns whether other weights may replace the version's, because nobody can load the published ones."""
    return version in state.rejected or version in state.unavailable


def was_found(state: State, version: int) -> bool:
    """Returns whether the trainer was asked to republish the version, and that has become needless."""
    return version in state.to_republish and not has_to_come(state, version)


def found(state: State, version: int) -> None:
    """Notes that an unavailable version is on a host again, with the same weights."""
    del state.unavailable[version]
    state.rejected.pop(version, None)
    _release(state, version)


def ask_for_unavailable(state: State) -> None:
    """Rejects unavailable versions that are needed, so that they are republished; releases those that are not."""
    for version, reason in sorted(state.unavailable.items()):
        if version < state.window.oldest_kept:
            found(state, version)  # no worker needs to load it
        elif version not in state.rejected and _is_needed(state, version):
            _rejected(state, do.RejectVersion(version, (), reason, 0.0))
        elif version in state.rejected and not _is_needed(state, version):
            del state.rejected[version]
            _release(state, version)
            state.window.quarantine(version)


def _is_needed(state: State, version: int) -> bool:
    """Returns whether a worker may have to load the version. New workers load the newest."""
    under_way = (state.groups["version"] == version) & (state.groups["unfinished"] > 0)
    return version == state.window.newest or bool(under_way.any())


def republished(state: State, version: int) -> None:
    """Treats a republished version as newly published. Loads of its earlier weights are ignored."""
    state.rejected.pop(version, None)  # an unavailable version is not in it after its last response has ended
    state.unavailable.pop(version, None)
    state.to_republish.discard(version)
    for worker in state.workers.values():
        worker.load_is_void |= worker.loading == version
    _release(state, version)


def _release(state: State, version: int) -> None:
    state.window.release(version)
    state.replan = True


def _reject(state: State, version: int, suspect: SuspectVersion) -> None:
    refusals = list(suspect.refusals.values())
    difference = max(refusal.canary_difference for refusal in refusals)
    del state.suspects[version]
    _rejected(state, do.RejectVersion(version, tuple(sorted(suspect.refusals)), refusals[0].reason, difference))


def _rejected(state: State, rejection: do.RejectVersion) -> None:
    state.rejected[rejection.version] = rejection
    state.to_republish.add(rejection.version)
    state.window.reject(rejection.version)
    state.stream_step = None
    state.counters.versions_rejected += 1
    state.replan = True
    state.out.append(rejection)


def _ask_another(state: State, version: int, suspect: SuspectVersion, working: Sequence[Worker]) -> None:
    """Chooses the worker that tries the version next, if none does: one that loads it, else the one with least work."""
    if any(worker.worker_id == suspect.second and not _has_refused(suspect, worker) for worker in working):
        return
    taken = {other.second for other in state.suspects.values() if other is not suspect}
    able = [worker for worker in working if not _has_refused(suspect, worker) and worker.worker_id not in taken]
    suspect.second = ""
    if able:
        second = min(
            able,
            key=lambda w: (
                w.worker_id in suspect.refusals, w.loading != version, w.target != version, w.assigned, w.index
            ),
        )  # fmt: skip
        suspect.second, second.target = second.worker_id, version
        state.rehosted(second)
        state.replan = True


def _has_refused(suspect: SuspectVersion, worker: Worker) -> bool:
    refusal = suspect.refusals.get(worker.worker_id)
    return refusal is not None and refusal.epoch == worker.epoch
