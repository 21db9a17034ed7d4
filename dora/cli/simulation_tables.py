"""What a person sees of simulated runs: one report, or all policies of a preset, beside the paper's numbers."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Group, JustifyMethod
from rich.table import Table
from rich.text import Text

from dora.cli.tables import duration
from dora.orchestrator.core.policies import SIMULATED
from dora.sim.paper_results import PaperResult, paper_result
from dora.sim.report import Report
from dora.sim.scenario import Scenario
from dora.sim.units import StepUnit, step_unit

NONE: Final = "-"
PAPER: Final = "paper"
ROUNDING_MIN: Final = 1e-9
COLUMNS: Final = (
    "policy", "W", "train:\nrollout", "{unit}/\nstep", PAPER, "speed-\nup", PAPER, "rollout\nonly", PAPER,
    "rollout\nspeed-up", PAPER, "tokens\n/s", PAPER, "bound", "over\nit", "work", "staleness", "errors",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Division:
    """Whose the accelerators are; colocated: all are both roles', one after the other."""

    gpus: int
    train_gpus: int
    rollout_gpus: int
    gpus_per_engine: int
    colocated: bool


@dataclass(frozen=True, slots=True)
class Compared:
    """One policy of a comparison: its report, its split, and how much faster than sync it was."""

    report: Report
    train_gpus: int
    rollout_gpus: int
    colocated: bool
    speedup: float | None  # tokens a second over those of sync
    rollout_speedup: float | None  # time in which the trainer only waits: that of sync over this one's
    paper: PaperResult | None


def report_tree(report: Report, scenario: Scenario) -> dict[str, Any]:
    """One run with its split and the paper's numbers beside it, null where there are none; as a tree."""
    paper = paper_result(report.preset, report.policy, report.window)
    return asdict(report) | asdict(division(scenario)) | {"paper": None if paper is None else asdict(paper)}


def division(scenario: Scenario) -> Division:
    cluster = scenario.cluster
    rollout_gpus = cluster.gpus if cluster.colocated else cluster.rollout_gpus
    return Division(cluster.gpus, cluster.train_gpus, rollout_gpus, cluster.gpus_per_engine, cluster.colocated)


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
            None if sync is None else _ratio(report.tokens_per_s, sync.tokens_per_s),
            None if sync is None else _ratio(_rollout_min(sync), _rollout_min(report)),
            paper_result(report.preset, report.policy, report.window),
        )
        rows.append(row)
    return rows


def comparison_table(rows: Sequence[Compared]) -> Group:
    """All policies of one preset, the shortest step bold. The paper's value stands beside ours, dim.

    *W*: window; *speed-up*: tokens/s over sync's; *rollout only*: share of a step in which the trainer waits;
    *rollout speed-up*: sync's such time over this one's; *bound*: of the bubble-free step; *work*: done over consumed,
    1 when stationary; *staleness*: mean and largest; *errors*: violations, lost and duplicated groups.
    """
    first = rows[0].report
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    unit = step_unit(row.report.step_time_min for row in rows)
    lines = [_comparison_row(row, unit) for row in rows]
    kept = [
        column for column, name in enumerate(COLUMNS) if name != PAPER or any(line[column] != NONE for line in lines)
    ]
    for column in kept:
        name = COLUMNS[column].format(unit=unit.name)
        justify: JustifyMethod = "left" if name == "policy" else "right"
        table.add_column(name.replace(" ", "\n"), justify=justify, style="dim" if name == PAPER else "", no_wrap=True)
    fastest = min(row.report.step_time_min for row in rows)
    for row, line in zip(rows, lines, strict=True):
        style = "bold" if row.report.step_time_min == fastest else ""
        table.add_row(*(line[column] for column in kept), style=style)
    title = f"{first.preset}: {first.steps} steps, seed {first.seed}, {first.predictor} lengths"
    return Group(Text(title, "bold"), table, Text("\n".join(_notes(rows)), "dim"))


def report_table(report: Report, scenario: Scenario) -> Group:
    """One run, beside the paper's numbers where there are some."""
    paper = paper_result(report.preset, report.policy, report.window)
    table = Table()
    table.add_column("")
    table.add_column("simulated", justify="right")
    if paper is not None:
        table.add_column("paper", justify="right", style="dim")
    for name, value, stated in _report_rows(report, paper):
        table.add_row(name, value, stated) if paper is not None else table.add_row(name, value)
    title = (
        f"{report.preset}, {report.policy}, window {report.window}: {report.steps} steps, seed {report.seed}, "
        f"{report.predictor} lengths, {_split(scenario)}"
    )
    note = "" if paper is None else f"paper: {paper.source}" + (f"; {paper.note}" if paper.note else "")
    return Group(Text(title, "bold"), table, Text(note, "dim"))


def _report_rows(report: Report, paper: PaperResult | None) -> list[tuple[str, str | Text, str]]:
    stated, unit = paper or PaperResult(""), step_unit([report.step_time_min])
    broken = report.violations + report.lost + report.duplicated
    selected, to_add = report.filter_fraction or report.redundant_fraction, report.dp_groups_to_add
    wasted = [
        ("groups filtered, dropped as redundant", f"{report.groups_filtered:,}, {report.groups_dropped:,}", ""),
        ("  tokens wasted on them", _percent(report.tokens_wasted_fraction, 1), ""),
    ]
    return [
        (f"{unit.word} a step", _time(report.step_time_min, unit), _time(stated.step_time_min, unit)),
        ("  bubble-free bound", _time(report.bound_min, unit), ""),
        ("  over the bound", _percent(_over(report)), ""),
        ("  bound of the batches consumed", _time(report.bound_consumed_min, unit), ""),
        ("  work done over consumed", _number(report.work_done_over_consumed, 3), ""),
        ("rollout only", _percent(report.rollout_only_fraction), _percent(stated.rollout_only_fraction)),
        ("  DP groups to add for it", "-" if to_add is None else f"{to_add:,} more", ""),
        ("tokens/s", _number(report.tokens_per_s, 0), _number(stated.tokens_per_s, 0)),
        ("staleness mean, max", _staleness(report, 2), ""),
        ("KV in use", _percent(report.kv_utilisation), ""),
        ("moves with KV, by re-prefill", f"{report.migrations_kv:,}, {report.migrations_reprefill:,}", ""),
        ("preemptions", f"{report.preemptions:,}", ""),
        *(wasted if selected else ()),
        ("overhead: balancing", _percent(report.overhead_balancing, 2), _percent(stated.overhead_balancing, 2)),
        ("  transfer", _percent(report.overhead_transfer, 2), _percent(stated.overhead_transfer, 2)),
        ("  re-prefill", _percent(report.overhead_reprefill, 2), ""),
        ("recall of the longest 20%", _number(report.recall_longest_20, 2), ""),
        (
            "violations, lost, duplicated",
            Text(f"{report.violations}, {report.lost}, {report.duplicated}", "bold red" if broken else "green"),
            "",
        ),
        ("simulated", duration(report.simulated_s), ""),
        ("  in", duration(report.wall_s), ""),
        ("  faster than real time", f"{report.sim_speedup:,.0f} x", ""),
    ]


def _comparison_row(row: Compared, unit: StepUnit) -> list[str | Text]:
    report, stated = row.report, row.paper or PaperResult("")
    broken = report.violations + report.lost + report.duplicated
    split = f"{row.train_gpus} both" if row.colocated else f"{row.train_gpus}:{row.rollout_gpus}"
    return [
        report.policy,
        NONE if report.policy in SIMULATED else str(report.window),
        split,
        _time(report.step_time_min, unit),
        _time(stated.step_time_min, unit),
        _number(row.speedup, 2),
        _number(stated.speedup, 2),
        _percent(report.rollout_only_fraction),
        _percent(stated.rollout_only_fraction),
        _number(row.rollout_speedup, 1),
        _number(stated.rollout_speedup, 1),
        _number(report.tokens_per_s, 0),
        _number(stated.tokens_per_s, 0),
        _time(report.bound_min, unit),
        _percent(None if row.colocated else _over(report)),  # the bound is of generation, without the training
        _number(report.work_done_over_consumed, 3),
        _staleness(report, 1),
        Text(str(broken), "bold red" if broken else ""),
    ]


def _notes(rows: Sequence[Compared]) -> list[str]:
    """The sources, then what must be known of single cells."""
    papers = [(row.report.policy, row.paper) for row in rows if row.paper is not None]
    notes = [f"paper: {source}" for source in dict.fromkeys(paper.source for _, paper in papers)]
    return notes + [f"{policy}: {paper.note}" for policy, paper in papers if paper.note]


def _staleness(report: Report, digits: int) -> str:
    """Mean and largest; where one response has several versions there is none."""
    if report.policy in SIMULATED:
        return NONE
    return f"{report.staleness_mean:.{digits}f}, {report.staleness_max}"


def _split(scenario: Scenario) -> str:
    cluster = scenario.cluster
    if cluster.colocated:
        return f"{cluster.gpus} GPUs colocated"
    return f"{cluster.train_gpus}:{cluster.rollout_gpus} GPUs"


def _rollout_min(report: Report) -> float:
    """What rounding leaves of a difference of two equal times is no time: nothing is faster by a ratio to it."""
    minutes = report.step_time_min * report.rollout_only_fraction
    return minutes if minutes > ROUNDING_MIN else 0.0


def _over(report: Report) -> float | None:
    ratio = _ratio(report.step_time_min, report.bound_min)
    return None if ratio is None else ratio - 1.0


def _ratio(above: float, below: float) -> float | None:
    return above / below if below > 0.0 else None


def _time(minutes: float | None, unit: StepUnit) -> str:
    return _number(None if minutes is None else unit.of_min(minutes), 2)


def _number(value: float | None, digits: int) -> str:
    return NONE if value is None or not isfinite(value) else f"{value:,.{digits}f}"


def _percent(value: float | None, digits: int = 0) -> str:
    return NONE if value is None or not isfinite(value) else f"{value:.{digits}%}"
