"""Trials in processes of their own: the same outcomes, in the same order, and no process left."""

import os
from dataclasses import dataclass
from multiprocessing import active_children

import pytest

from dora.core.policies import POLICIES
from dora.lab.sim.faults.sweep import sweep
from dora.lab.sim.faults.trial import Trial
from dora.lab.sim.faults.trial_processes import TRIALS_A_PROCESS, TrialsEnded, outcomes, processes_for
from dora.lab.sim.ledger import Failure
from tests.refusals import refused
from tests.sweeps import counts_of

TRIALS = [Trial(seed, "dora", "kill") for seed in range(7)]


@dataclass(frozen=True)
class OddStalls(Trial):
    def run(self) -> Failure | None:
        return Failure("stalled", str(self.seed), 1.5) if self.seed % 2 else None


@dataclass(frozen=True)
class EndsAt3(Trial):
    def run(self) -> Failure | None:
        if self.seed == 3:
            os._exit(9)
        return None


@pytest.mark.parametrize("count", counts_of(2, len(TRIALS)))
def test_two_processes_find_what_one_finds(count: int) -> None:
    found = list(outcomes(TRIALS[:count], jobs=2))
    assert found == list(outcomes(TRIALS[:count])) == [None] * count


@pytest.mark.full
@pytest.mark.parametrize("jobs", [2, 3])
def test_outcomes_come_in_the_order_of_the_trials(jobs: int) -> None:
    found = list(outcomes([OddStalls(trial.seed, "dora") for trial in TRIALS], jobs))
    assert found == [Failure("stalled", str(trial.seed), 1.5) if trial.seed % 2 else None for trial in TRIALS]


def test_a_process_that_ends_is_told_with_its_trial() -> None:
    with refused(TrialsEnded, field="--replay", value="3:dora:kill:all:0:2", names=("code 9",)):
        list(outcomes([EndsAt3(trial.seed, "dora", "kill") for trial in TRIALS], 2))
    assert not active_children()


def test_processes_end_with_those_who_ask_no_more() -> None:
    found = outcomes(TRIALS, 2)
    assert next(found) is None
    assert active_children()
    found.close()  # type: ignore[attr-defined]
    assert not active_children()


@pytest.mark.full
@pytest.mark.parametrize("count", [2, 14])
def test_a_sweep_reports_the_same_from_any_number_of_processes(count: int) -> None:
    policies = tuple(POLICIES)
    assert sweep(range(count), policies, "kill", jobs=2) == sweep(range(count), policies, "kill")


def test_few_trials_are_worth_one_process() -> None:
    assert processes_for(1) == processes_for(2 * TRIALS_A_PROCESS - 1) == 1
    assert 1 <= processes_for(100 * TRIALS_A_PROCESS) <= 100
