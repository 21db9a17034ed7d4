"""What a person sees of one simulated run; and how times and shares are written."""

from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from dora.cli.stationarity import stationarity
from dora.cli.tables import duration
from dora.sim.report import Report
from dora.sim.scenario import Scenario
from dora.sim.units import StepUnit, step_unit

NONE: Final = "-"  # not measured, not stated, or without a meaning here


@dataclass(frozen=True, slots=True)
class Division:
    """Whose the accelerators are; colocated: all are both roles', one after the other."""

    gpus: int
    train_gpus: int
    rollout_gpus: int
    gpus_per_engine: int
    colocated: bool


def report_tree(report: Report, scenario: Scenario) -> dict[str, Any]:
    """One run with its split, as a tree."""
    return asdict(report) | asdict(division(scenario))


def division(scenario: Scenario) -> Division:
    """How the accelerators of a scenario are divided."""
    cluster = scenario.cluster
    rollout_gpus = cluster.gpus if cluster.colocated else cluster.rollout_gpus
    return Division(cluster.gpus, cluster.train_gpus, rollout_gpus, cluster.gpus_per_engine, cluster.colocated)


def report_table(report: Report, scenario: Scenario) -> Group:
    """One run."""
    table = Table()
    table.add_column("")
    table.add_column("simulated", justify="right")
    for name, value in _report_rows(report):
        table.add_row(name, value)
    title = (
        f"{report.preset}, {report.policy}, window {report.window}: {report.steps} steps, seed {report.seed}, "
        f"{report.predictor} lengths, {_split(scenario)}"
    )
    doubts = stationarity([report])
    return Group(Text(title, "bold"), table, *([Text(doubts, "yellow")] if doubts else ()))


def _report_rows(report: Report) -> list[tuple[str, str | Text]]:
    unit = step_unit([report.step_time_min])
    broken = report.violations + report.lost + report.duplicated
    selected, to_add = report.filter_fraction or report.redundant_fraction, report.dp_groups_to_add
    wasted = [
        ("groups filtered, dropped as redundant", f"{report.groups_filtered:,}, {report.groups_dropped:,}"),
        ("  tokens wasted on them", percent(report.tokens_wasted_fraction, 1)),
    ]
    return [
        (f"{unit.word} a step", step_time(report.step_time_min, unit)),
        ("  bubble-free bound", step_time(report.bound_min, unit)),
        ("  over the bound", percent(over_bound(report))),
        ("  bound of the batches consumed", step_time(report.bound_consumed_min, unit)),
        ("  work done over consumed", number(report.work_done_over_consumed, 3)),
        ("trainer waits (rollout only)", percent(report.rollout_only_fraction)),
        ("  DP groups to add for it", "-" if to_add is None else f"{to_add:,} more"),
        ("tokens/s", number(report.tokens_per_s, 0)),
        ("staleness mean, max", staleness(report, 2)),
        ("KV in use", percent(report.kv_utilisation)),
        ("moves with KV, by re-prefill", f"{report.migrations_kv:,}, {report.migrations_reprefill:,}"),
        ("preemptions", f"{report.preemptions:,}"),
        *(wasted if selected else ()),
        ("overhead: balancing", percent(report.overhead_balancing, 2)),
        ("  transfer", percent(report.overhead_transfer, 2)),
        ("  re-prefill", percent(report.overhead_reprefill, 2)),
        ("recall of the longest 20%", number(report.recall_longest_20, 2)),
        (
            "violations, lost, duplicated",
            Text(f"{report.violations}, {report.lost}, {report.duplicated}", "bold red" if broken else "green"),
        ),
        ("simulated", duration(report.simulated_s)),
        ("  in", duration(report.wall_s)),
        ("  faster than real time", f"{report.sim_speedup:,.0f} x"),
    ]


def staleness(report: Report, digits: int) -> str:
    """Mean and largest; where one response has several versions there is none."""
    if report.staleness_mean is None:
        return NONE
    return f"{report.staleness_mean:.{digits}f}, {report.staleness_max}"


def _split(scenario: Scenario) -> str:
    cluster = scenario.cluster
    if cluster.colocated:
        return f"{cluster.gpus} GPUs colocated"
    return f"{cluster.train_gpus}:{cluster.rollout_gpus} GPUs"


def over_bound(report: Report) -> float | None:
    """How much longer than its bound a step took, as a share of it; None without a bound."""
    over = ratio(report.step_time_min, report.bound_min)
    return None if over is None else over - 1.0


def ratio(above: float, below: float) -> float | None:
    """One over the other; None where there is nothing to divide by."""
    return above / below if below > 0.0 else None


def step_time(minutes: float | None, unit: StepUnit) -> str:
    """A time in its unit, without the unit's name."""
    return number(None if minutes is None else unit.of_min(minutes), 2)


def number(value: float | None, digits: int) -> str:
    """``1234.5`` with 1 digit as ``1,234.5``."""
    return NONE if value is None or not isfinite(value) else f"{value:,.{digits}f}"


def percent(value: float | None, digits: int = 0) -> str:
    """``0.125`` with 1 digit as ``12.5%``."""
    return NONE if value is None or not isfinite(value) else f"{value:.{digits}%}"
