"""Long simulations: refused beforehand if they take weeks, given up if they stand still, and always ended."""

import math
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
from annotated_types import Ge, Gt, Le, Lt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from dora.config import BalanceConfig, settings_tree
from dora.core.plan import Plan, Trigger
from dora.core.policies import POLICIES, Strategy
from dora.core.policies.base import BasePolicy
from dora.core.view import View
from dora.errors import InvalidValue
from dora.lab.sim import extent
from dora.lab.sim.extent import check_extent, limit_s
from dora.lab.sim.partial import strategies
from dora.lab.sim.presets import NAMES, composed, scenario_for
from dora.lab.sim.run import BrokenRun, check_cluster, expected_bound_s, simulate
from dora.lab.sim.scenario import Scenario
from tests.refusals import refused
from tests.sweeps import examples, some_of


def small(*overrides: str, policy: str = "laxity") -> Scenario:
    return composed(settings_tree(None, overrides), "small", policy)


# ------------------------------------------------------------------------------------------------------ before it runs


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("trainer.step_s", "1e+300", "a number from 0 to 100000"),
        ("trainer.publish_s", "1000000.0", "a number from 0 to 100000"),
        ("cluster.load_s", "1000000.0", "a number from 0 to 100000"),
        ("cluster.link_latency_s", "61", "a number from 0 to 60"),
        ("cluster.link_bytes_per_s", "1e-300", "a number from 1 to 1e+18"),
        ("cluster.weights_bytes", "1e+300", "a number from 1 to 1e+18"),
        ("cluster.kv_token_bytes", "1e+300", "a number from 1 to 1e+12"),
        ("cluster.gpu_memory_bytes", "1e-300", "0, or at least 1"),
        ("cluster.cost.kv_token_s", "1e+300", "a number from 0 to 10000"),
        ("cluster.cost.expert_fraction", "1e-300", "a number from 1e-06 to 1"),
        ("cluster.cost.imbalance", "1e+300", "a number from 0 to 10000"),
        ("workload.lengths.mu", "1e+300", "a number from -50 to 50"),
        ("workload.lengths.sigma", "1000000.0", "a number from 0 to 20"),
        ("workload.lengths.scale", "1e+300", "a number from 1e-06 to 1000000"),
        ("workload.turns.environment_mean_s", "1e+300", "a number from 0 to 100000"),
        ("workload.turns.environment_sigma", "1000.0", "a number from 0 to 3"),
        ("balance.period_s", "1e-300", "a number from 0.001 to 100000"),
        ("filter_fraction", "0.999", "a number from 0 to 0.99"),
    ],
)
def test_extreme_values_are_refused_with_their_bounds(field: str, value: str, allowed: str) -> None:
    with refused(InvalidValue, field=field, value=value, allowed=allowed):
        small("workload.turns.most=2", f"{field}={value}")


@pytest.mark.parametrize(
    ("cost", "step_s"),
    [("weights_s=0,step_s=1e-10", "1e-10"), ("weights_s=1e-4,expert_fraction=1e-6,step_s=0", "0")],
)
def test_a_step_of_an_engine_takes_a_nanosecond_at_least(cost: str, step_s: str) -> None:
    """One request reads only a part of a mixture of experts' weights."""
    with refused(InvalidValue, field="cluster.cost.step_s", value=float(step_s), names=("1e-09 s",)):
        small(f"cluster.cost={{kv_token_s=0,request_s=0,{cost}}}")
    small("cluster.cost={kv_token_s=1e-9,weights_s=0,request_s=0,step_s=0}")


@pytest.mark.parametrize(
    ("overrides", "field", "value", "bound"),
    [
        (["cluster.cost.step_s=1e4"], "cluster.cost.step_s", 1e4, "14 days"),
        (
            ["cluster={link_latency_s=60,slots=1}", "trainer.groups_per_step=4000"],
            "cluster.link_latency_s",
            60.0,
            "14 days",
        ),
        (["cluster.cost.prefill_token_s=1e4"], "cluster.cost.prefill_token_s", 1e4, "14 days"),
        (
            ["workload.turns={most=20,environment_mean_s=1e5}"],
            "workload.turns.environment_mean_s",
            1e5,
            "14 days",
        ),
        (
            ["workload.tasks=[{name='a',share=1.0,turns={most=20,environment_mean_s=1e5}}]"],
            "workload.tasks.0.turns.environment_mean_s",
            1e5,
            "14 days",
        ),
        (["balance.period_s=0.01", "trainer.step_s=1e4"], "balance.period_s", 0.01, "0.101"),
        (["redundant_fraction=0.1"], "redundant_fraction", 0.1, "1/8"),
    ],
)
def test_steps_of_weeks_and_periods_without_number_are_refused_before_anything_runs(
    overrides: list[str], field: str, value: float, bound: str
) -> None:
    with refused(InvalidValue, field=field, value=value, names=(bound,)):
        check_cluster(small(*overrides))


def test_the_period_that_is_named_is_enough() -> None:
    check_extent(small("balance.period_s=0.101", "trainer.step_s=1e4"))


def test_no_step_of_a_preset_is_near_its_limit() -> None:
    """It is a hundred times what bound and training take together, and more."""
    for name in NAMES:
        for policy in ("sync", "laxity"):
            scenario = scenario_for(name, policy)
            check_extent(scenario)
            assert limit_s(scenario) > 100 * (expected_bound_s(scenario) + scenario.trainer.step_s), name


# ------------------------------------------------------------------------------------------------------- while it runs


class Idle(BasePolicy):
    """Gives no DP group any version."""

    def plan(self, view: View, trigger: Trigger) -> Plan:
        return Plan({})


def broken(scenario: Scenario) -> BrokenRun:
    with pytest.raises(BrokenRun) as found:
        simulate(scenario, steps=1, warmup=0, seed=0)
    return found.value


def test_a_run_in_which_nothing_goes_on_any_more_is_told_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(config: BalanceConfig) -> Idle:
        return Idle(config)

    monkeypatch.setitem(POLICIES, "idle", Strategy(made))
    scenario = small(policy="idle")
    report = broken(scenario).report
    assert (report.stalled, report.violations, report.raised) == (1, 1, False)
    assert report.violation == (
        f"step 0 stands still: it is not done after {limit_s(scenario):,.0f} s, 100 times what a step takes where "
        "nothing overlaps, and nothing goes on any more (the trainer has 0 of 8 groups)"
    )


@pytest.mark.parametrize(
    ("overrides", "going_on"),
    [
        ([], "responses being generated: "),
        (["cluster.load_s=1000"], "workers loading weights: 2; "),
        (["workload.turns={most=2,environment_mean_s=1000,environment_sigma=0}"], "waiting for their environment: "),
        (["trainer.step_s=1000", "trainer.streams=false"], "batches in training: 1; "),
    ],
)
def test_a_slow_run_is_told_as_slow_with_what_goes_on(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], going_on: str
) -> None:
    """With less patience every run is slow."""
    scenario = small(*overrides)
    monkeypatch.setattr(extent, "PATIENCE", 0.05 if not overrides else 0.3)
    report = broken(scenario).report
    assert report.stalled == 1 and report.violation.startswith("step 0 is slow: it is not done after")
    assert going_on in report.violation and "stands still" not in report.violation


@pytest.mark.full  # half a minute
def test_lengths_that_drift_upwards_have_the_patience_of_the_longest() -> None:
    """Responses of one token now grow to two thousand each, and the simulation is no slower than that."""
    lengths = "workload.lengths={mu=-10,drift_per_step=0.49}"
    assert limit_s(small(lengths, "trainer.step_s=0")) > limit_s(small("workload.lengths.mu=12", "trainer.step_s=0"))
    report = simulate(
        small(lengths, "trainer.step_s=0", "balance.period_s=0.1", "cluster.load_s=0"), steps=60, warmup=0, seed=0
    )
    assert report.violations == 0


@pytest.mark.parametrize("latency_s", some_of(("0", "5e-324", "1e-12"), "1e-12"))
def test_messages_that_take_less_time_than_the_clock_can_tell_arrive(latency_s: str) -> None:
    """Each of those sent at one moment; 1e-12 s is such a time from some hours on."""
    overrides = (f"cluster.link_latency_s={latency_s}", "cluster.load_s=2e4", "cluster.slots=1")
    report = simulate(small(*overrides, policy="partial"), steps=1, warmup=0, seed=0)
    assert (report.steps, report.violations) == (1, 0)


def test_a_step_of_a_day_is_simulated_like_any_other() -> None:
    report = simulate(small("trainer={step_s=5e4,publish_s=5e4}"), steps=1, warmup=0, seed=0)
    assert report.step_time_min * 60 == pytest.approx(1e5, rel=0.01) and report.violations == 0


# ------------------------------------------------------------------------------------------------- whatever is accepted


def floats(section: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float, float]]:
    """Each number with a point, and its bounds."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from floats(field.annotation, (*path, name))
        elif field.annotation is float:
            least = [
                each.ge if isinstance(each, Ge) else each.gt + 1e-12
                for each in field.metadata
                if isinstance(each, Ge | Gt)
            ]
            most = [
                each.le if isinstance(each, Le) else each.lt - 1e-12
                for each in field.metadata
                if isinstance(each, Le | Lt)
            ]
            yield (*path, name), float(least[0]), float(most[0])


# Of re-balancing its period alone: triggers without end, as by the least pressure, take minutes in a step of days.
BOUNDS = [each for each in floats(Scenario) if each[0][0] != "balance" or each[0][-1] == "period_s"]
WHOLE: list[tuple[tuple[str, ...], tuple[int, ...]]] = [
    (("cluster", "slots"), (1, 2, 16)),
    (("cluster", "kv_tokens"), (5000, 8000, 1_000_000)),
    (("trainer", "groups_per_step"), (1, 3, 8)),
    (("trainer", "micro_batches"), (1, 16)),
    (("workload", "group_size"), (1, 4)),
    (("workload", "turns", "most"), (1, 3)),
    (("workload", "lengths", "cap_tokens"), (1, 100, 2000)),
]


LONGEST = st.sampled_from([0.0, 10.0, 1e5])


@st.composite
def extremes(draw: st.DrawFn) -> dict[str, Any]:
    """Some numbers of a small scenario at a bound of theirs, or anywhere between."""
    tree: dict[str, Any] = {"cluster": {"gpu_memory_bytes": 0.0}}

    def put(path: tuple[str, ...], value: Any) -> None:
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = value

    for path, least, most in draw(st.lists(st.sampled_from(BOUNDS), max_size=6)):
        put(path, draw(st.one_of(st.sampled_from([least, most]), st.floats(least, most), st.just(max(least, 5e-324)))))
    for path, values in draw(st.lists(st.sampled_from(WHOLE), max_size=3)):
        put(path, draw(st.sampled_from(values)))
    if draw(st.booleans()):
        turns = {"most": 3, "environment_mean_s": draw(LONGEST), "environment_sigma": draw(st.sampled_from([0.0, 3.0]))}
        of_one = {"scale": draw(st.sampled_from([1e-6, 1.0, 1e6])), "sigma": draw(st.sampled_from([0.0, 20.0]))}
        put(("workload", "tasks"), [{"name": "a", "share": 0.5, "turns": turns}, {"name": "b", "share": 0.5, **of_one}])
    put(("balance", "predictor"), draw(st.sampled_from(["oracle", "statistics", "ranker"])))
    return tree


@given(extremes(), st.sampled_from(list(strategies())))
@settings(max_examples=examples(8), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_whatever_is_accepted_runs_a_step_or_says_why_not(tree: dict[str, Any], policy: str) -> None:
    """No traceback, no overflow, no number that is none; that none hangs, the time limit of the test shows."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            report = simulate(composed(tree, "small", policy, shared=True), steps=1, warmup=0, seed=0)
    except InvalidValue:
        return
    except BrokenRun as error:
        assert error.report.stalled and not error.report.raised, error.report
        return
    numbers = {name: value for name, value in asdict(report).items() if isinstance(value, float)}
    assert {name: value for name, value in numbers.items() if not math.isfinite(value)} == {}
    assert (report.violations, report.lost, report.duplicated) == (0, 0, 0)
