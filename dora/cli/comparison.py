"""What a person sees of all policies of a preset, side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from dora.cli.simulation_tables import NONE, division, number, over_bound, percent, ratio, staleness, step_time
from dora.cli.stationarity import stationarity
from dora.sim.partial import has_versions
from dora.sim.report import Report
from dora.sim.scenario import Scenario
from dora.sim.units import StepUnit, step_unit

WIDTH: Final = 100  # characters, of the notes; the table is narrower unless its numbers are very long
ROUNDING_MIN: Final = 1e-9
HEADINGS: Final = (
    "policy", "W", "GPUs\ntrain:\nrollout", "{unit} a\nstep", "bound", "over\nbound", "tokens\n/s",
    "times\nsync's\nspeed", "trainer\nwaits", "times\nless", "work\ndone/\nused", "stale:\nmean,\nmax", "errors",
)  # fmt: skip
LEGEND: Final = (
    "W: window. GPUs: one number where training and rollout take turns. bound: of the bubble-free step. times sync's "
    "speed: tokens/s over sync's. trainer waits: share of a step; times less: sync's waiting time over this one's. "
    "work: done over that of the batches trained on, 1 when stationary. stale: in steps. errors: promises broken, "
    "groups lost or duplicated."
)


@dataclass(frozen=True, slots=True)
class Compared:
    """One policy of a comparison: its report, its split, and how much faster than sync it was."""

    report: Report
    train_gpus: int
    rollout_gpus: int
    colocated: bool
    speedup: float | None  # tokens a second over those of sync
    rollout_speedup: float | None  # time in which the trainer only waits: that of sync over this one's


def comparison(reports: Sequence[Report], scenarios: Sequence[Scenario]) -> list[Compared]:
    """The reports of all policies of one preset, in the same order, each held against that of ``sync``."""
    sync = next((report for report in reports if report.policy == "sync"), None)
    rows = []
    for report, scenario in zip(reports, scenarios, strict=True):
        divided = division(scenario)
        row = Compared(
            report,
            divided.train_gpus,
            divided.rollout_gpus,
            divided.colocated,
            None if sync is None else ratio(report.tokens_per_s, sync.tokens_per_s),
            None if sync is None else ratio(_rollout_min(sync), _rollout_min(report)),
        )
        rows.append(row)
    return rows


def comparison_table(rows: Sequence[Compared]) -> Group:
    """All policies of one preset, the shortest step bold."""
    first = rows[0].report
    unit = step_unit(row.report.step_time_min for row in rows)
    fastest = min(row.report.step_time_min for row in rows)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    for place, heading in enumerate(HEADINGS):
        heading = heading.format(unit=unit.name)
        table.add_column(heading, justify="right" if place else "left", no_wrap=True, vertical="bottom")
    for row in rows:
        table.add_row(*_simulated(row, unit), style="bold" if row.report.step_time_min == fastest else "")
    title = f"{first.preset}: {first.steps} steps, seed {first.seed}, {first.predictor} lengths"
    legend = fill(LEGEND, WIDTH, subsequent_indent="  ")
    doubts = fill(stationarity([row.report for row in rows]), WIDTH, subsequent_indent="  ")
    doubt = [Text(f"\n{doubts}", "yellow")] if doubts else []
    return Group(Text(title, "bold"), table, *doubt, Text(f"\n{legend}", "dim"))


def _simulated(row: Compared, unit: StepUnit) -> list[str | Text]:
    report = row.report
    broken = report.violations + report.lost + report.duplicated
    return [
        report.policy,
        str(report.window) if has_versions(report.policy) else NONE,
        f"{row.train_gpus}" if row.colocated else f"{row.train_gpus}:{row.rollout_gpus}",
        step_time(report.step_time_min, unit),
        step_time(report.bound_min, unit),
        percent(None if row.colocated else over_bound(report)),  # the bound is of generation, without the training
        number(report.tokens_per_s, 0),
        number(row.speedup, 2),
        percent(report.rollout_only_fraction),
        number(row.rollout_speedup, 1),
        number(report.work_done_over_consumed, 3),
        staleness(report, 1),
        Text(str(broken), "bold red" if broken else ""),
    ]


def _rollout_min(report: Report) -> float:
    """What rounding leaves of a difference of two equal times is no time: nothing is faster by a ratio to it."""
    minutes = report.step_time_min * report.rollout_only_fraction
    return minutes if minutes > ROUNDING_MIN else 0.0
