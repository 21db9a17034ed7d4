"""A table that compares all policies of a preset."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from dora.lab.sim.figures.report import Report, StepUnit, step_unit
from dora.lab.sim.partial import has_versions
from dora.lab.sim.scenario import Scenario
from dora.ops.view.numbers import NONE, number, percent, ratio
from dora.ops.view.simulation import Division, division, over_bound, staleness, stationarity, step_time
from dora.ops.view.tables import SHEET, Column, Note, Sheet

ROUNDING_MIN: Final = 1e-9
LEGEND: Final = (
    "W: window. GPUs: one number if training and rollout take turns. bound: the bubble-free step. times sync's "
    "speed: tokens/s relative to sync. trainer waits: share of a step; times less: sync's waiting time over its own. "
    "work: generated over consumed by training, 1 if stationary. stale: in steps. errors: guarantees violated, "
    "groups lost or duplicated."
)


@dataclass(frozen=True, slots=True)
class Compared:
    """One policy of a comparison: its report, its split, and its speed relative to sync."""

    report: Annotated[Report, "the report of `dora simulate`"]
    train_gpus: Annotated[int, "accelerators that train"]
    rollout_gpus: Annotated[int, "accelerators that generate"]
    colocated: Annotated[bool, "whether both roles take turns on all accelerators"]
    speedup: Annotated[float | None, "tokens_per_s over that of sync"]
    rollout_speedup: Annotated[
        float | None, "waiting time of the trainer per step, sync's over this one's; null if it never waits"
    ]


class Shown(NamedTuple):
    """One row of the table, and the unit of its times."""

    row: Compared
    unit: StepUnit


COLUMNS: Final[Sequence[Column[Shown]]] = (
    Column("policy", "the strategy; the fastest is bold", lambda it: it.row.report.policy, words=True),
    Column(
        "W",
        "window; none for `partial`, which has no versions",
        lambda it: str(it.row.report.window) if has_versions(it.row.report.policy) else NONE,
        rank=1,
    ),
    Column(
        "GPUs\ntrain:\nrollout",
        "accelerators for training and for generation; one number: colocated",
        lambda it: f"{it.row.train_gpus}" if it.row.colocated else f"{it.row.train_gpus}:{it.row.rollout_gpus}",
        rank=2,
    ),
    Column("{unit} a\nstep", "mean time of a step", lambda it: step_time(it.row.report.step_time_min, it.unit)),
    Column("bound", "bubble-free bound of a step", lambda it: step_time(it.row.report.bound_min, it.unit), rank=4),
    Column(
        "over\nbound",
        "excess of the step over the bound; none if colocated, because the bound excludes training",
        lambda it: percent(None if it.row.colocated else over_bound(it.row.report)),
    ),
    Column("tokens\n/s", "tokens trained on", lambda it: number(it.row.report.tokens_per_s, 0)),
    Column("times\nsync's\nspeed", "tokens/s relative to sync", lambda it: number(it.row.speedup, 2)),
    Column(
        "trainer\nwaits",
        "share of a step in which the trainer waits",
        lambda it: percent(it.row.report.rollout_only_fraction),
    ),
    Column("times\nless", "sync's waiting time over this one's", lambda it: number(it.row.rollout_speedup, 1), rank=5),
    Column(
        "work\ndone/\nused",
        "engine work generated over work trained on; 1: stationary",
        lambda it: number(it.row.report.work_done_over_consumed, 3),
        rank=6,
    ),
    Column("stale:\nmean,\nmax", "staleness of the groups trained on", lambda it: staleness(it.row.report, 1), rank=3),
    Column("errors", "guarantees violated, groups lost or duplicated: always 0", lambda it: _errors(it.row.report)),
)


def comparison(reports: Sequence[Report], scenarios: Sequence[Scenario]) -> list[Compared]:
    """Compares the reports of all policies of one preset with that of ``sync``, in the same order."""
    sync = next((report for report in reports if report.policy == "sync"), None)
    return [_compared(report, division(scenario), sync) for report, scenario in zip(reports, scenarios, strict=True)]


def comparison_table(rows: Sequence[Compared]) -> Group:
    """All policies of one preset, with the shortest step in bold."""
    first = rows[0].report
    unit = step_unit(row.report.step_time_min for row in rows)
    fastest = min(row.report.step_time_min for row in rows)
    title = f"{first.preset}: {first.steps} steps, seed {first.seed}, {first.predictor} lengths"
    table = Sheet(
        COLUMNS,
        [Shown(row, unit) for row in rows],
        title,
        looks=(SHEET,),
        headings=[column.heading.format(unit=unit.name) for column in COLUMNS],
        style=lambda it: "bold" if it.row.report.step_time_min == fastest else "",
    )
    suspects = stationarity([row.report for row in rows])
    suspect: list[RenderableType] = [Text(), Note(suspects, "yellow", indent=2)] if suspects else []
    return Group(table, *suspect, Text(), Note(LEGEND, "dim", indent=2))


def _compared(report: Report, split: Division, sync: Report | None) -> Compared:
    return Compared(
        report=report,
        train_gpus=split.train_gpus,
        rollout_gpus=split.rollout_gpus,
        colocated=split.colocated,
        speedup=None if sync is None else ratio(report.tokens_per_s, sync.tokens_per_s),
        rollout_speedup=None if sync is None else ratio(_rollout_min(sync), _rollout_min(report)),
    )


def _errors(report: Report) -> Text:
    broken = report.violations + report.lost + report.duplicated
    return Text(str(broken), "bold red" if broken else "")


def _rollout_min(report: Report) -> float:
    """The time of a step in which only rollout runs; 0 for rounding errors, which would give absurd ratios."""
    minutes = report.step_time_min * report.rollout_only_fraction
    return minutes if minutes > ROUNDING_MIN else 0.0
