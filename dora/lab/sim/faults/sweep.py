"""Runs many seeds of small clusters with faults. Reports the failures, with the shortest replay of each."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from dora.lab.sim.faults.fault import Fault
from dora.lab.sim.faults.shrinking import shrunk
from dora.lab.sim.faults.trial import DRAWN, Trial
from dora.lab.sim.faults.trial_processes import outcomes
from dora.lab.sim.ledger import Failure

SHRUNK_MAX: Final = 10  # failures that are shrunk, as a core that fails everywhere needs no more


@dataclass(frozen=True, slots=True)
class SweepFailure:
    """A failed seed, shrunk. ``replay`` is the command that reproduces it."""

    seed: Annotated[int, "of the cluster"]
    policy: Annotated[str, "the strategy"]
    kind: Annotated[str, "violation, lost, duplicated or stalled"]
    message: Annotated[str, "what was broken, with the facts"]
    at_s: Annotated[float, "simulated time"]
    faults: Annotated[tuple[Fault, ...], "the faults that are left after the trial was cut down"]
    replay: Annotated[str, "the command that shows it again"]


@dataclass(frozen=True, slots=True)
class SweepReport:
    """Number of seeds, and of failures by kind."""

    seeds: Annotated[int, "small clusters tried"]
    violations: Annotated[int, "of these, those that broke a promise"]
    lost: Annotated[int, "those in which a group vanished"]
    duplicated: Annotated[int, "those in which a group was delivered twice"]
    stalled: Annotated[int, "those whose trainer waited in vain"]
    failures: Annotated[tuple[SweepFailure, ...], "each that failed"] = ()

    @property
    def ok(self) -> bool:
        return not self.failures


def sweep(
    seeds: Sequence[int],
    policies: Sequence[str],
    kinds: str = "all",
    progress: Callable[[float], None] | None = None,
    jobs: int = 1,
    window: str = DRAWN,
) -> SweepReport:
    """Runs one trial per seed and alternates the policies. ``kinds`` of faults are in the format of
    ``fault_kinds.kinds_of``, ``window`` is a Trial's.

    ``progress`` receives the completed share. ``jobs`` is the number of processes, which does not change the report.
    """
    trials = [Trial(seed, policies[seed % len(policies)], kinds, window=window) for seed in seeds]
    failures: list[SweepFailure] = []
    for number, (trial, failure) in enumerate(zip(trials, outcomes(trials, jobs), strict=True), start=1):
        if failure is not None:
            failures.append(_cut_down(trial, failure) if len(failures) < SHRUNK_MAX else _found(trial, failure))
        if progress is not None:
            progress(number / len(trials))
    return _report(len(trials), failures)


def replay(token: str) -> tuple[Trial, SweepReport]:
    """Runs the trial of a token again. Raises InvalidValue if the text is not a token."""
    trial = Trial.of(token)
    failure = trial.run()
    return trial, _report(1, [] if failure is None else [_found(trial, failure)])


def _cut_down(trial: Trial, failure: Failure) -> SweepFailure:
    smaller = shrunk(trial, failure.kind)
    return _found(smaller, smaller.run() or failure)


def _found(trial: Trial, failure: Failure) -> SweepFailure:
    command = f"dora simulate sweep --replay '{trial.token}'"
    return SweepFailure(trial.seed, trial.policy, failure.kind, failure.message, failure.at_s, trial.faults, command)


def _report(seeds: int, failures: Sequence[SweepFailure]) -> SweepReport:
    kinds = Counter(failure.kind for failure in failures)
    return SweepReport(seeds, kinds["violation"], kinds["lost"], kinds["duplicated"], kinds["stalled"], tuple(failures))
