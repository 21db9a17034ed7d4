"""Runs many trials in a pool of processes."""

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Final, TypeAlias

from dora.errors import DoraError
from dora.lab.sim.faults.trial import Trial
from dora.lab.sim.ledger import Failure
from dora.orchestrator.plugins import load_strategies
from dora.system.process_tree import die_with

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import SynchronizedArray

TRIALS_A_PROCESS: Final = 40  # fewer trials take less time than the start of a process
_INT64: Final = "q"
_RUNNING: list["Running"] = []  # in a process of the pool: the array shared with its parent

Running: TypeAlias = "SynchronizedArray[int]"  # two integers per process: its id, and 1 + the index of its trial


class TrialsEnded(DoraError):
    """A process ended during a trial: the system killed it, for example for its memory, or Python crashed."""


def processes_for(trials: int) -> int:
    """The number of processes for these trials, at most one per core available to this process."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, trials // TRIALS_A_PROCESS))


def outcomes(trials: Sequence[Trial], jobs: int = 1) -> Iterator[Failure | None]:
    """Yields the outcome of each trial, in order. With ``jobs`` 1, it runs them in this process.

    Raises TrialsEnded if a process ends during a trial. The other processes are then killed, as they are when the
    caller stops early.
    """
    if jobs == 1:
        yield from (trial.run() for trial in trials)
        return
    context = get_context("spawn")
    running: Running = context.Array(_INT64, 2 * jobs)
    others = set(active_children())
    pool = ProcessPoolExecutor(jobs, context, _begin, (os.getpid(), running))
    processes: Mapping[int | None, BaseProcess] = {}
    try:
        found = pool.map(_run, range(len(trials)), trials)
        processes = {process.pid: process for process in active_children() if process not in others}
        yield from found
    except BrokenProcessPool as error:
        pool.shutdown()
        raise _ended(trials, running, processes) from error
    finally:
        for process in processes.values():
            process.kill()
        pool.shutdown(cancel_futures=True)


def _begin(parent: int, running: Running) -> None:
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    load_strategies()
    _RUNNING.append(running)


def _run(index: int, trial: Trial) -> Failure | None:
    (running,) = _RUNNING
    with running.get_lock():
        numbers = running[:]
        place = next(place for place in range(0, len(numbers), 2) if numbers[place] in (0, os.getpid()))
        running[place : place + 2] = os.getpid(), 1 + index
    return trial.run()


def _ended(trials: Sequence[Trial], running: Running, processes: Mapping[int | None, BaseProcess]) -> TrialsEnded:
    """Names the trial of the process that ended. The pool ended the other processes by SIGTERM."""
    numbers = running[:]
    tried = {pid: number - 1 for pid, number in zip(numbers[::2], numbers[1::2], strict=True) if pid}
    codes = {pid: process.exitcode for pid, process in processes.items()}
    first = [pid for pid, code in codes.items() if code != -signal.SIGTERM] or list(codes)
    for pid in first:
        if pid in tried:
            token = trials[tried[pid]].token
            said = f"the process of `dora simulate sweep --replay '{token}'` ended with code {codes[pid]}"
            return TrialsEnded(said, "--replay", token)
    return TrialsEnded(f"a process ended with code {codes[first[0]] if first else None} before its first trial")
