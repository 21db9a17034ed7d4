"""Each version is sampled in one precision, by all of its workers: that of the configuration, or the full one.

An engine cannot change its precision, so a worker whose next version has another one is started again. The trainer
measures how far the engines' policy is from its own (``dora.data.mismatch``). Once that is certainly above
``workers.mismatch_max``, the next version to be published, and every later one, is sampled in full precision. The
version that the same commit publishes keeps its precision, which its record states already.
"""

from dora.core import commands as do
from dora.core import events as on
from dora.core.fleet.worker import Worker
from dora.core.state import State


def is_full(state: State, version: int) -> bool:
    """Returns whether the version is sampled in full precision although the configuration names a lower one."""
    return 0 <= state.full_precision_from <= version


def fits(state: State, worker: Worker, version: int) -> bool:
    """Returns whether the worker's engine has the version's precision."""
    return not state.config.workers.numerics.is_low or worker.full_precision == is_full(state, version)


def restart(state: State, worker: Worker) -> None:
    """Asks for an engine of the other precision. The worker's loss follows as an event, then its next epoch."""
    worker.stopping = worker.draining = True
    state.rehosted(worker)
    state.out.append(do.RestartWorker(worker.worker_id, worker.epoch, not worker.full_precision))


def judge(state: State, event: on.StepCommitted) -> None:
    """Takes the mismatch of the version that the step trained, once its successor is published."""
    workers = state.config.workers
    if workers.numerics.is_low and 0 < workers.mismatch_max < event.mismatch and state.full_precision_from < 0:
        state.full_precision_from = state.window.newest + 1
        state.out.append(do.FallBack(state.full_precision_from, event.step, event.mismatch))
