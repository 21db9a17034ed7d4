"""Trials in processes of their own: the same outcomes, in the same order, and no process left."""

import json
import sys
from io import StringIO

import pytest

from dora.core.groups.window import Window
from dora.core.policies import POLICIES
from dora.sim import trial_processes as module
from dora.sim.ledger import Failure
from dora.sim.sweep import sweep
from dora.sim.trial import Trial
from dora.sim.trial_processes import TRIALS_A_PROCESS, TrialsEnded, outcomes, processes_for, serve

TRIALS = [Trial(seed, "dora", "kill") for seed in range(7)]
ANSWERING = """
import json, sys
for line in sys.stdin:
    seed = int(line.split(":")[0])
    print(json.dumps(ANSWER), flush=True)
"""
NOTHING_LOST = "None"
ODD_ONES_STALL = "{'kind': 'stalled', 'message': str(seed), 'at_s': 1.5} if seed % 2 else None"
ENDS_AT_3 = "sys.exit(9) if seed == 3 else None"


def child(answer: str) -> tuple[str, ...]:
    """A process that answers each token with what this expression is."""
    return (sys.executable, "-c", ANSWERING.replace("ANSWER", answer))


def test_two_processes_find_what_one_finds() -> None:
    found = list(outcomes(TRIALS, jobs=2))
    assert found == list(outcomes(TRIALS)) == [None] * len(TRIALS)


@pytest.mark.parametrize("jobs", [2, 3])
def test_outcomes_come_in_the_order_of_the_trials(jobs: int) -> None:
    found = list(outcomes(TRIALS, jobs, child(ODD_ONES_STALL)))
    assert found == [Failure("stalled", str(trial.seed), 1.5) if trial.seed % 2 else None for trial in TRIALS]


def test_a_process_that_ends_is_told_with_its_trial() -> None:
    with pytest.raises(TrialsEnded, match=r"--replay '3:dora:kill:all:0:2'` ended with code 9"):
        list(outcomes(TRIALS, 2, child(ENDS_AT_3)))


def test_processes_end_with_those_who_ask_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[module.TrialProcess] = []
    begin = module.TrialProcess.__init__

    def noted(self: module.TrialProcess, command: tuple[str, ...]) -> None:
        begin(self, command)
        started.append(self)

    monkeypatch.setattr(module.TrialProcess, "__init__", noted)
    found = outcomes(TRIALS, 2, child(NOTHING_LOST))
    assert next(found) is None
    found.close()  # type: ignore[attr-defined]
    assert len(started) == 2 and all(process._process.returncode is not None for process in started)


def test_a_process_answers_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    admissible = Window.admissible
    monkeypatch.setattr(
        Window, "admissible", lambda self, version: admissible(self, version) + (version == self.newest)
    )
    trials = [Trial(0, "dora"), Trial(1, "dora")]
    answers = StringIO()
    serve(StringIO("".join(f"{trial.token}\n" for trial in trials)), answers)
    found = [json.loads(line) for line in answers.getvalue().splitlines()]
    assert [each and Failure(**each) for each in found] == [trial.run() for trial in trials]
    assert any(found)


def test_a_sweep_reports_the_same_from_any_number_of_processes() -> None:
    seeds = range(2 * len(TRIALS))
    policies = tuple(POLICIES)
    assert sweep(seeds, policies, "kill", jobs=2) == sweep(seeds, policies, "kill")


def test_few_trials_are_worth_one_process() -> None:
    assert processes_for(1) == processes_for(2 * TRIALS_A_PROCESS - 1) == 1
    assert 1 <= processes_for(100 * TRIALS_A_PROCESS) <= 100
