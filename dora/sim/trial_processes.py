"""Many trials, on as many cores as are asked for: each in a process of its own that gets tokens and answers in JSON.

a line in    3:dora:all:all:0:2                       the token of a trial
a line out   null                                     every promise was kept
             {"kind": "lost", "message": ..., ...}    a ``ledger.Failure``
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from queue import SimpleQueue
from typing import Final, TextIO

from dora.errors import DoraError
from dora.orchestrator.plugins import load_strategies
from dora.sim.ledger import Failure
from dora.sim.trial import Trial

TRIALS_A_PROCESS: Final = 40  # fewer take less time than a process takes to start
COMMAND: Final = (sys.executable, "-m", "dora.sim.trial_processes")


class TrialsEnded(DoraError):
    """A process that tried seeds ended before it answered: killed, as for its memory, or Python itself crashed."""


def processes_for(trials: int) -> int:
    """Processes that so many trials are worth, at most one a core that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, trials // TRIALS_A_PROCESS))


def outcomes(trials: Sequence[Trial], jobs: int = 1, command: Sequence[str] = COMMAND) -> Iterator[Failure | None]:
    """What became of each trial, in their order. ``jobs`` 1: tried in this process.

    Raises TrialsEnded where a process ends in the middle of a trial; what is tried elsewhere then is given up.
    """
    if jobs == 1:
        yield from (trial.run() for trial in trials)
        return
    processes: list[TrialProcess] = []
    idle: SimpleQueue[TrialProcess] = SimpleQueue()
    threads = ThreadPoolExecutor(jobs)  # each waits for a process

    def outcome(trial: Trial) -> Failure | None:
        process = idle.get()
        try:
            return process.run(trial)
        finally:
            idle.put(process)

    try:
        for _ in range(jobs):
            processes.append(TrialProcess(command))
            idle.put(processes[-1])
        yield from threads.map(outcome, trials)
    finally:
        for process in processes:
            process.kill()
        threads.shutdown(cancel_futures=True)
        for process in processes:
            process.close()


class TrialProcess:
    """A process that tries one seed at a time. Where this one ends, so does that: nothing is left to read."""

    def __init__(self, command: Sequence[str]) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """After ``kill``, when nobody waits for an answer any more."""
        self._process.communicate()

    def run(self, trial: Trial) -> Failure | None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended: the missing answer tells
            print(trial.token, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer.endswith("\n"):
            code = self._process.wait()
            raise TrialsEnded(f"the process of `dora simulate sweep --replay '{trial.token}'` ended with code {code}")
        found = json.loads(answer)
        return None if found is None else Failure(**found)


def serve(tokens: TextIO, answers: TextIO) -> None:
    """Runs the trial of each line, to the last."""
    for line in tokens:
        failure = Trial.of(line.strip()).run()
        print(json.dumps(None if failure is None else asdict(failure)), file=answers, flush=True)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):  # Ctrl-C is told by the process that started this one
        load_strategies()
        serve(sys.stdin, sys.stdout)
