"""A bad publication is undone: what its first workers cannot reproduce is rejected, and published anew.

    published ──one loads it well──▶ proven: whoever refuses it from now on is at fault itself (fleet.py)
        └──one refuses its weights──▶ in doubt: one other worker tries it, nobody else
                                        ├──it loads it well──▶ proven
                                        └──it refuses too──▶ rejected ──published anew──▶ published

Two distinct workers reject a version, or all that work, if these have refused it in their present lives. Whoever has
refused it loads what the next plan gives it: the newest version that is not withheld, or another that has work.
Version 0 is the model itself: nobody could publish it anew, so who refuses it is at fault.

A version may also be *gone*: no host has its weights any more. It is withheld, and rejected as long as it is needed: as
the newest one, or for responses that are under way. Once their groups are cancelled it is asked for no more.
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
    """Whether a refusal speaks against the version, not against the worker."""
    return version > 0 and version not in state.proven


def may_load(state: State, worker: Worker) -> bool:
    """Whether the worker may load its target now: of one in doubt, only the worker that is to try it."""
    return worker.target not in state.window.quarantined or tries(state, worker)


def tries(state: State, worker: Worker) -> bool:
    """Whether this worker is the one that is to try a version in doubt."""
    return any(suspect.second == worker.worker_id for suspect in state.suspects.values())


def check_none(state: State) -> None:
    """Raises VersionRejected for the oldest version that is to be published anew."""
    if state.rejected:
        told = state.rejected[min(state.rejected)]
        raise VersionRejected(told.version, told.reason, told.worker_ids, told.canary_difference)


def proves(state: State, version: int) -> None:
    """A worker has loaded the version well."""
    state.proven.add(version)
    if state.suspects.pop(version, None) is not None:
        _release(state, version)


def refused(state: State, worker: Worker, version: int, event: on.CommandDone) -> None:
    """A worker says that the weights of an unproven version are wrong; ``judge`` then sees what follows.

    A version that was let go while the worker loaded it is in no doubt: the worker gets another one.
    """
    if version >= state.window.oldest_kept:
        suspect = state.suspects.setdefault(version, SuspectVersion())
        suspect.refusals[worker.worker_id] = Refusal(worker.epoch, event.error, event.canary_difference)
        state.window.quarantine(version)
    state.replan = True


def judge(state: State) -> None:
    """Rejects what has been refused by enough workers, and sees to it that another one tries the rest."""
    working = sorted((w for w in state.workers.values() if not w.draining), key=lambda w: w.index)
    for version, suspect in sorted(state.suspects.items()):
        if version < state.window.oldest_kept:  # later versions have carried the window past it
            del state.suspects[version]
            _release(state, version)
        elif len(suspect.refusals) >= WITNESSES or (working and all(_has_refused(suspect, w) for w in working)):
            _reject(state, version, suspect)
    for version, suspect in sorted(state.suspects.items()):  # who tried one that is settled now may try another
        _ask_another(state, version, suspect, working)


def gone(state: State, event: on.VersionUnavailable) -> bool:
    """Nobody can load a version any more. Returns whether that is news."""
    version, window = event.version, state.window
    if version in state.rejected or version in state.gone:
        return False
    if not max(1, window.oldest_kept) <= version <= window.newest:
        return False
    state.suspects.pop(version, None)
    state.gone[version] = event.reason
    window.quarantine(version)
    arrival.vanished(state, version)
    state.replan = True
    return True


def has_to_come(state: State, version: int) -> bool:
    """Whether other weights may take the place of this version's: nobody can load those that were published."""
    return version in state.rejected or version in state.gone


def was_found(state: State, version: int) -> bool:
    """Whether the trainer was told to publish this version anew, and it has become needless since."""
    return version in state.asked and not has_to_come(state, version)


def found(state: State, version: int) -> None:
    """What was gone is on a host again, with the very weights."""
    del state.gone[version]
    state.rejected.pop(version, None)
    _release(state, version)


def ask_for_unavailable(state: State) -> None:
    """Rejects the versions that are gone and needed, so that they are published anew; no longer those that are not."""
    for version, reason in sorted(state.gone.items()):
        if version < state.window.oldest_kept:
            found(state, version)  # nobody is to load it any more
        elif version not in state.rejected and _is_needed(state, version):
            _rejected(state, do.RejectVersion(version, (), reason, 0.0))
        elif version in state.rejected and not _is_needed(state, version):
            del state.rejected[version]
            _release(state, version)
            state.window.quarantine(version)


def _is_needed(state: State, version: int) -> bool:
    """Whether a worker may have to load it: whoever comes anew loads the newest."""
    under_way = (state.groups["version"] == version) & (state.groups["unfinished"] > 0)
    return version == state.window.newest or bool(under_way.any())


def republished(state: State, version: int) -> None:
    """Other weights are in place: the version is as if published now. What is still being loaded of it counts for
    nothing."""
    state.rejected.pop(version, None)  # of one that is gone: no longer there, where the last response of it has ended
    state.gone.pop(version, None)
    state.asked.discard(version)
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


def _rejected(state: State, told: do.RejectVersion) -> None:
    state.rejected[told.version] = told
    state.asked.add(told.version)
    state.window.reject(told.version)
    state.stream_step = None
    state.counters.versions_rejected += 1
    state.replan = True
    state.out.append(told)


def _ask_another(state: State, version: int, suspect: SuspectVersion, working: Sequence[Worker]) -> None:
    """Chooses who tries the version next, if nobody does: who is at it already, else who has the least to leave."""
    if any(worker.worker_id == suspect.second and not _has_refused(suspect, worker) for worker in working):
        return
    taken = {other.second for other in state.suspects.values() if other is not suspect}
    able = [worker for worker in working if not _has_refused(suspect, worker) and worker.worker_id not in taken]
    suspect.second = ""
    if able:
        second = min(
            able,
            key=lambda w: (
                w.worker_id in suspect.refusals, w.loading != version, w.target != version, w.held, w.index
            ),
        )  # fmt: skip
        suspect.second, second.target = second.worker_id, version
        state.rehosted(second)
        state.replan = True


def _has_refused(suspect: SuspectVersion, worker: Worker) -> bool:
    """In its present life."""
    refusal = suspect.refusals.get(worker.worker_id)
    return refusal is not None and refusal.epoch == worker.epoch
