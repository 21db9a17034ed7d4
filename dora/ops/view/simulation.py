"""The report of one simulated run, and whether the run was stationary."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Annotated, Any, Final, NamedTuple

from rich.console import Group
from rich.text import Text

from dora.lab.sim.figures.report import Report, StepUnit, step_unit
from dora.lab.sim.scenario import Scenario
from dora.ops.view.numbers import NONE, duration, number, percent, ratio
from dora.ops.view.tables import FRAMED, WIDEST, Column, Note, Sheet

STEPS_MIN: Final = 40  # measured: shorter runs are dominated by the first versions
WORK_OFF_MAX: Final = 0.01


@dataclass(frozen=True, slots=True)
class Division:
    """The split of the accelerators. If colocated, the roles take turns on all of them."""

    gpus: Annotated[int, "accelerators in all"]
    train_gpus: Annotated[int, "accelerators that train"]
    rollout_gpus: Annotated[int, "accelerators that generate"]
    gpus_per_engine: Annotated[int, "accelerators per worker"]
    colocated: Annotated[bool, "whether the roles take turns on all accelerators"]


class Line(NamedTuple):
    """One line of the table: its name, the fields of the report that it shows, and their format."""

    name: str
    fields: tuple[str, ...]
    cell: Callable[[Report, StepUnit], str | Text]


LINES: Final = (
    Line("{unit} a step", ("step_time_min",), lambda run, unit: step_time(run.step_time_min, unit)),
    Line("  bubble-free bound", ("bound_min",), lambda run, unit: step_time(run.bound_min, unit)),
    Line("  over the bound", ("step_time_min", "bound_min"), lambda run, unit: percent(over_bound(run))),
    Line(
        "  bound of the consumed batches",
        ("bound_consumed_min",),
        lambda run, unit: step_time(run.bound_consumed_min, unit),
    ),
    Line(
        "  work done over consumed",
        ("work_done_over_consumed",),
        lambda run, unit: number(run.work_done_over_consumed, 3),
    ),
    Line(
        "trainer waits (rollout only)",
        ("rollout_only_fraction",),
        lambda run, unit: percent(run.rollout_only_fraction),
    ),
    Line(
        "  per step, min to max",
        ("step_waited_min",),
        lambda run, unit: f"{step_time(min(run.step_waited_min), unit)} to {step_time(max(run.step_waited_min), unit)}",
    ),
    Line(
        "  workers to add for it",
        ("dp_groups_to_add",),
        lambda run, unit: NONE if run.dp_groups_to_add is None else f"{run.dp_groups_to_add:,} more",
    ),
    Line("tokens/s", ("tokens_per_s",), lambda run, unit: number(run.tokens_per_s, 0)),
    Line("staleness mean, max", ("staleness_mean", "staleness_max"), lambda run, unit: staleness(run, 2)),
    Line("  share of each, from 0", ("staleness_groups",), lambda run, unit: _shares(run)),
    Line("  mean per step, min to max", ("step_staleness",), lambda run, unit: _extent(run.step_staleness)),
    Line("window at the end", ("window_last",), lambda run, unit: str(run.window_last)),
    Line("KV in use", ("kv_utilisation",), lambda run, unit: percent(run.kv_utilisation)),
    Line(
        "moves with KV, by re-prefill",
        ("migrations_kv", "migrations_reprefill"),
        lambda run, unit: f"{run.migrations_kv:,}, {run.migrations_reprefill:,}",
    ),
    Line("preemptions", ("preemptions",), lambda run, unit: f"{run.preemptions:,}"),
    Line(
        "groups filtered, dropped as redundant",
        ("groups_filtered", "groups_dropped"),
        lambda run, unit: f"{run.groups_filtered:,}, {run.groups_dropped:,}",
    ),
    Line(
        "  tokens wasted on them",
        ("tokens_wasted_fraction",),
        lambda run, unit: percent(run.tokens_wasted_fraction, 1),
    ),
    Line("overhead: balancing", ("overhead_balancing",), lambda run, unit: percent(run.overhead_balancing, 2)),
    Line("  transfer", ("overhead_transfer",), lambda run, unit: percent(run.overhead_transfer, 2)),
    Line("  re-prefill", ("overhead_reprefill",), lambda run, unit: percent(run.overhead_reprefill, 2)),
    Line("recall of the longest 20%", ("recall_longest_20",), lambda run, unit: number(run.recall_longest_20, 2)),
    Line("violations, lost, duplicated", ("violations", "lost", "duplicated"), lambda run, unit: _promises(run)),
    Line("simulated", ("simulated_s",), lambda run, unit: duration(run.simulated_s)),
    Line("  in", ("wall_s",), lambda run, unit: duration(run.wall_s)),
    Line("  faster than real time", ("sim_speedup",), lambda run, unit: f"{run.sim_speedup:,.0f} x"),
)
OF_SELECTION: Final = {"groups_filtered", "groups_dropped", "tokens_wasted_fraction"}


def report_tree(report: Report, scenario: Scenario) -> dict[str, Any]:
    return asdict(report) | asdict(division(scenario))


def division(scenario: Scenario) -> Division:
    cluster = scenario.cluster
    rollout_gpus = cluster.gpus if cluster.colocated else cluster.rollout_gpus
    return Division(cluster.gpus, cluster.train_gpus, rollout_gpus, cluster.gpus_per_engine, cluster.colocated)


def report_table(report: Report, scenario: Scenario) -> Group:
    """One run, line by line. Lines of group selection are shown only if the scenario has one."""
    unit = step_unit([report.step_time_min])
    selects = report.filter_fraction or report.redundant_fraction
    columns: Sequence[Column[Line]] = (
        Column("", "", lambda line: line.name.format(unit=unit.word), words=True),
        Column("simulated", "", lambda line: line.cell(report, unit)),
    )
    left_out = (set() if selects else OF_SELECTION) | (set() if report.window == "auto" else {"window_last"})
    lines = [line for line in LINES if left_out.isdisjoint(line.fields)]
    title = (
        f"{report.preset}, {report.policy}, window {report.window}: {report.steps} steps, seed {report.seed}, "
        f"{report.predictor} lengths, {_split(scenario)}"
    )
    suspects = stationarity([report])
    table = Sheet(columns, lines, title, looks=(FRAMED,))
    notes = [Note(f"window {change}", "dim", widest=WIDEST) for change in report.window_changes]
    return Group(table, *notes, *([Note(suspects, "yellow", widest=WIDEST)] if suspects else ()))


def stationarity(reports: Sequence[Report]) -> str:
    """The reasons why these runs may not be stationary, in one line, or empty. Short runs flatter a strategy."""
    steps = min(report.steps for report in reports)
    off = [report for report in reports if not _balanced(report)]
    reasons = []
    if steps < STEPS_MIN:
        reasons.append(f"{steps} steps were measured, fewer than {STEPS_MIN} (--steps)")
    if off:
        whose = "" if len(reports) == 1 else f" of {', '.join(report.policy for report in off)}"
        reasons.append(f"work done over consumed{whose} is off 1 by more than {WORK_OFF_MAX:.0%}{_cancelled(off)}")
    return f"may not be stationary: {'; '.join(reasons)}" if reasons else ""


def staleness(report: Report, digits: int) -> str:
    """Formats mean and maximum, or ``-`` if a response has several versions."""
    if report.staleness_mean is None:
        return NONE
    return f"{report.staleness_mean:.{digits}f}, {report.staleness_max}"


def _shares(report: Report) -> str:
    if not report.staleness_groups:
        return NONE
    total = sum(report.staleness_groups)
    return ", ".join(percent(groups / total) for groups in report.staleness_groups)


def _extent(values: Sequence[float] | None) -> str:
    return f"{min(values):.2f} to {max(values):.2f}" if values else NONE


def over_bound(report: Report) -> float | None:
    """The excess of a step's time over its bound, as a share of the bound; None without a bound."""
    over = ratio(report.step_time_min, report.bound_min)
    return None if over is None else over - 1.0


def step_time(minutes: float, unit: StepUnit) -> str:
    """Formats a time in this unit, without the unit's name."""
    return number(unit.of_min(minutes), 2)


def _promises(report: Report) -> Text:
    broken = report.violations + report.lost + report.duplicated
    style = "bold red" if broken else "green"
    return Text(f"{report.violations}, {report.lost}, {report.duplicated}", style)


def _split(scenario: Scenario) -> str:
    cluster = scenario.cluster
    if cluster.colocated:
        return f"{cluster.gpus} GPUs colocated"
    return f"{cluster.train_gpus}:{cluster.rollout_gpus} GPUs"


def _balanced(report: Report) -> bool:
    ratio = report.work_done_over_consumed
    return isfinite(ratio) and abs(ratio - 1.0) <= WORK_OFF_MAX


def _cancelled(reports: Sequence[Report]) -> str:
    """Explains a ratio above 1: cancelled work is never consumed."""
    return ", cancelled groups included" if any(report.tokens_wasted_fraction > 0.0 for report in reports) else ""
