"""The tables of a simulated run, and of all policies side by side."""

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from dora.lab.sim.figures.report import Report
from dora.lab.sim.presets import scenario_for
from dora.ops.cli.offline.simulate import run as simulate
from dora.ops.view.comparison import comparison, comparison_table
from dora.ops.view.simulation import report_table, report_tree
from tests.unit.test_plot import REPORT


def shown(renderable: object) -> str:
    stream = io.StringIO()
    Console(file=stream, width=170).print(renderable)
    return stream.getvalue()


def reports(**step_time_min: float) -> list[Report]:
    return [replace(REPORT, policy=policy, step_time_min=minutes) for policy, minutes in step_time_min.items()]


def test_a_report_has_its_split_its_bound_and_its_overhead() -> None:
    text = shown(report_table(REPORT, scenario_for("dora-64", "dora")))
    for words in ("17.00", "15.63", "22%", "40:24", "2 more"):
        assert words in text, words


@pytest.mark.parametrize(
    ("step_min", "bound_min", "words"),
    [
        (17.0, 15.63, ("minutes a step", "17.00", "15.63")),
        (1.0, 0.5, ("minutes a step", "1.00", "0.50")),
        (0.16, 0.07, ("seconds a step", "9.60", "4.20")),
    ],
)
def test_short_steps_are_shown_in_seconds(step_min: float, bound_min: float, words: tuple[str, ...]) -> None:
    report = replace(REPORT, step_time_min=step_min, bound_min=bound_min)
    scenario = scenario_for("dora-64", "dora")
    text = shown(report_table(report, scenario))
    assert all(word in text for word in words), text
    assert "1 h 42 min" in text and "2.0 s" in text  # simulated, and the time that it took
    text = shown(comparison_table(comparison([report], [scenario])))
    assert all(word in text for word in words[1:]), text


def test_the_json_of_a_run_has_its_split() -> None:
    tree = report_tree(REPORT, scenario_for("dora-64", "dora"))
    assert (tree["train_gpus"], tree["rollout_gpus"], tree["colocated"]) == (40, 24, False)
    sync = report_tree(replace(REPORT, policy="sync", window=1), scenario_for("dora-64", "sync"))
    assert (sync["train_gpus"], sync["rollout_gpus"], sync["colocated"]) == (64, 64, True)


def test_no_rollout_speedup_over_what_rounding_leaves_of_no_time() -> None:
    scenarios = [scenario_for("small", policy) for policy in ("sync", "laxity")]
    sync, laxity = reports(sync=3.0, laxity=2.0)
    rows = comparison([sync, replace(laxity, rollout_only_fraction=1e-16)], scenarios)
    assert rows[1].rollout_speedup is None


def test_a_comparison_says_how_much_faster_than_sync() -> None:
    scenarios = [scenario_for("dora-64", policy) for policy in ("sync", "dora")]
    sync, dora = reports(sync=25.5, dora=17.0)
    rows = comparison([replace(sync, tokens_per_s=13_000.0, rollout_only_fraction=0.7), dora], scenarios)
    assert rows[1].speedup == pytest.approx(20 / 13)
    assert rows[1].rollout_speedup == pytest.approx(25.5 * 0.7 / (17.0 * 0.22))
    text = shown(comparison_table(rows))
    for words in ("40:24", "1.54"):
        assert words in text, words
    assert re.search(r"sync +3 +64 ", text)


def test_what_was_not_measured_is_null_in_json_and_a_dash_in_the_table() -> None:
    report = replace(REPORT, recall_longest_20=float("nan"))
    assert simulate._finite({"a": [float("nan"), float("inf"), 1.0]}) == {"a": [None, None, 1.0]}
    line = next(
        row for row in shown(report_table(report, scenario_for("dora-64", "dora"))).splitlines() if "recall" in row
    )
    assert " - " in line


@pytest.mark.parametrize(
    ("steps", "work", "wasted", "line"),
    [
        (40, 1.009, 0.0, ""),
        (40, 0.991, 0.0, ""),
        (40, 1.02, 0.0, "may not be stationary: work done over consumed is off 1 by more than 1%"),
        (40, 1.25, 0.2, "stationary: work done over consumed is off 1 by more than 1%, cancelled groups included"),
        (40, float("nan"), 0.0, "may not be stationary: work done over consumed is off 1 by more than 1%"),
        (39, 1.0, 0.0, "may not be stationary: 39 steps were measured, fewer than 40 (--steps)"),
        (8, 0.8, 0.0, "fewer than 40 (--steps); work done over consumed is off 1 by more than 1%"),
    ],
)
def test_a_run_that_cannot_be_taken_as_stationary_says_so_in_one_line(
    steps: int, work: float, wasted: float, line: str
) -> None:
    report = replace(REPORT, steps=steps, work_done_over_consumed=work, tokens_wasted_fraction=wasted)
    lines = shown(report_table(report, scenario_for("dora-64", "dora"))).splitlines()
    told = [each.rstrip() for each in lines if "stationary" in each]
    assert (len(told) == 1 and told[0].endswith(line)) if line else not told, lines


def test_a_comparison_names_the_policies_that_cannot_be_taken_as_stationary() -> None:
    policies = {"sync": 1.0, "dora": 0.98, "laxity": 1.005}
    found = [
        replace(REPORT, policy=policy, steps=40, work_done_over_consumed=work) for policy, work in policies.items()
    ]
    scenarios = [scenario_for("dora-64", policy) for policy in policies]
    text = shown(comparison_table(comparison(found, scenarios)))
    assert "stationary: work done over consumed of dora is off 1 by more than 1%" in text
    assert "taken as stationary" not in shown(comparison_table(comparison([found[0]], scenarios[:1])))
