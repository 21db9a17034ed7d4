"""Filter and redundant rollout: what is begun and not trained on is asked for, counted, and touches no promise."""

from collections import Counter
from dataclasses import asdict

import pytest

from dora.core import commands as do
from dora.core import events as on
from dora.core.policies import POLICIES
from dora.core.rules.selection import REDUNDANT
from dora.errors import InvalidValue
from dora.lab.sim.figures.report import Report
from dora.lab.sim.ledger import Lost, SimLedger
from dora.lab.sim.presets import composed
from dora.lab.sim.run import simulate
from dora.lab.sim.scenario import Scenario
from dora.lab.sim.workload import FILTERED, Filter, SimPrompt, WorkloadStream
from dora.lab.sim.world import World
from tests.refusals import refused

STEPS, WARMUP = 6, 2


def scenario_of(policy: str, **fields: float) -> Scenario:
    return composed(fields, "small", policy)


def report_of(policy: str, seed: int = 3, **fields: float) -> Report:
    return simulate(scenario_of(policy, **fields), steps=STEPS, warmup=WARMUP, seed=seed)


class Watched:
    """A world that has trained ``STEPS`` steps, with what the trainer got and what was cancelled by reason."""

    def __init__(self, scenario: Scenario, seed: int = 3) -> None:
        self.trained: list[list[SimPrompt]] = []
        self.cancelled: dict[str, list[SimPrompt]] = {FILTERED: [], REDUNDANT: []}
        self.finished_when_dropped: list[bool] = []
        self.world = World(scenario, seed)
        self.world.trainer.on_step = lambda step, _began, _ended, groups, _busy: self.trained.append(
            [group.prompt for group in groups]
        )
        drop = self.world.ledger.drop

        def dropped(command: do.DropGroup) -> None:
            group = self.world.ledger.groups[command.group_id]
            self.cancelled[command.reason].append(group.prompt)
            self.finished_when_dropped.append(not group.unscored)
            drop(command)

        self.world._carry_out[do.DropGroup] = dropped
        self.world.run_until(lambda: len(self.trained) == STEPS, limit_s=50_000.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_promises_hold_with_both(policy: str) -> None:
    """``simulate`` checks them; the books balance, and nothing is in them twice."""
    report = report_of(policy, filter_fraction=0.3, redundant_fraction=0.25)
    assert (report.violations, report.lost, report.duplicated) == (0, 0, 0)
    assert (report.filter_fraction, report.redundant_fraction) == (0.3, 0.25)
    assert report.groups_filtered > 0
    assert 0.0 < report.tokens_wasted_fraction < 1.0


@pytest.mark.parametrize("policy", POLICIES)
def test_off_they_cancel_nothing(policy: str) -> None:
    watched = Watched(scenario_of(policy))
    assert watched.world.ledger.cancelled == 0 and not any(watched.cancelled.values())
    report = report_of(policy)
    assert (report.groups_filtered, report.groups_dropped, report.tokens_wasted_fraction) == (0, 0, 0.0)


def test_the_filter_lets_that_share_of_finished_groups_go_and_the_trainer_never_sees_them() -> None:
    scenario = scenario_of("dora", filter_fraction=0.4)
    watched = Watched(scenario)
    chosen = Filter(scenario.filter_fraction, seed=3)
    assert all(chosen.lets_go(prompt.prompt_id) for prompt in watched.cancelled[FILTERED])
    assert not any(chosen.lets_go(prompt.prompt_id) for step in watched.trained for prompt in step)
    assert watched.finished_when_dropped and all(watched.finished_when_dropped)
    assert all(len(step) == scenario.trainer.groups_per_step for step in watched.trained)
    share = len(watched.cancelled[FILTERED]) / (len(watched.cancelled[FILTERED]) + sum(map(len, watched.trained)))
    assert share == pytest.approx(0.4, abs=0.15)


def test_the_filter_follows_from_the_seed_and_the_prompt() -> None:
    scenario = scenario_of("dora", filter_fraction=0.25)
    prompts = WorkloadStream(scenario.workload, 0, 8).take(4000)
    chosen = [[Filter(0.25, seed).lets_go(prompt.prompt_id) for prompt in prompts] for seed in (1, 1, 2)]
    assert chosen[0] == chosen[1] != chosen[2]
    assert sum(chosen[0]) / len(prompts) == pytest.approx(0.25, abs=0.03)


def test_redundant_rollout_drops_a_steps_slowest_groups_and_shortens_the_step() -> None:
    scenario = scenario_of("dora", redundant_fraction=0.25)
    watched = Watched(scenario)
    assert not any(watched.finished_when_dropped)
    dropped, trained = watched.cancelled[REDUNDANT], [prompt for step in watched.trained for prompt in step]
    spare = 0.25 * scenario.trainer.groups_per_step
    assert 0 < len(dropped) <= spare * (STEPS + 1)
    assert all(len(step) == scenario.trainer.groups_per_step for step in watched.trained)
    longest = [sum(max(prompt.lengths) for prompt in prompts) / len(prompts) for prompts in (dropped, trained)]
    assert longest[0] > 1.2 * longest[1], "what is dropped is no longer than the rest"
    with_it, without = (simulate(each, steps=12, warmup=4, seed=0) for each in (scenario, scenario_of("dora")))
    assert with_it.groups_dropped > 0 and with_it.step_time_min < without.step_time_min


def test_cancelled_groups_leave_the_books_with_their_tokens_counted() -> None:
    ledger, scenario = SimLedger(1, 4, spare=1), scenario_of("dora")
    ledger.offer(prompts := WorkloadStream(scenario.workload, 0, 4).take(2))
    for number, prompt in enumerate(prompts):
        names = tuple(f"g{number}.{index}" for index in range(prompt.group_size))
        ledger.admit(do.AdmitGroup(f"g{number}", prompt.prompt_id, 0, names))
    ledger.take_over(on.Progress("w0", 1, 0, {"g0.0": 1}), "g0.0")
    ledger.drop(do.DropGroup("g0", REDUNDANT))
    for index in range(prompts[1].group_size):
        ledger.scored(f"g1.{index}", 1.0)
    ledger.drop(do.DropGroup("g1", FILTERED))
    assert (ledger.cancelled, ledger.cancelled_tokens) == (2, 1)
    assert ledger.cancel_reasons == Counter({REDUNDANT: 1, FILTERED: 1})
    assert not ledger.groups and not ledger.responses and not ledger.duplicated()
    with pytest.raises(Lost):
        ledger.drop(do.DropGroup("g0", REDUNDANT))


@pytest.mark.parametrize(
    ("version", "spare", "unscored"),
    [(0, 0, 2), (1, 1, 2), (0, 1, 0)],
    ids=["more than was asked for", "not due", "finished"],
)
def test_the_books_refuse_what_is_not_redundant(version: int, spare: int, unscored: int) -> None:
    ledger = SimLedger(1, 4, spare)
    ledger.offer(prompts := WorkloadStream(scenario_of("dora").workload, 0, 4).take(1))
    ledger.admit(do.AdmitGroup("g0", prompts[0].prompt_id, version, ("g0.0", "g0.1")))
    ledger.groups["g0"].unscored = unscored
    with refused(Lost, names=("g0", f"{unscored} unscored", f"{spare} at most")):
        ledger.drop(do.DropGroup("g0", REDUNDANT))


def test_the_same_seed_gives_the_same_report() -> None:
    first, second = (asdict(report_of("laxity", filter_fraction=0.2, redundant_fraction=0.25)) for _ in range(2))
    timed = ("wall_s", "sim_speedup")
    assert {key: first[key] for key in first if key not in timed} == {
        key: second[key] for key in second if key not in timed
    }


@pytest.mark.parametrize(("field", "value"), [("filter_fraction", 1.0), ("redundant_fraction", -0.1)])
def test_impossible_shares_are_refused(field: str, value: float) -> None:
    with refused(InvalidValue, field=field, value=value):
        scenario_of("dora", **{field: value})
