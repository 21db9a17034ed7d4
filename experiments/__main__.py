"""The papers' tables from the simulator: what it measures beside what a paper states, and how far apart they are.

    python -m experiments tables dora|longcat|laminar|tools|staleflow|streamrl|verl|all [--steps 6] [--only NAME]
    python -m experiments tables all --short
    python -m experiments scenario laminar-7b-64 [--policy laminar] [--window 5] > row.toml
    python -m experiments pinning [--minutes 30] [--page docs/pinning.md]

Every run of a table is a line of its own as soon as it has ended; what is claimed of its setting follows, and at the
end the means over settings: arithmetic, as the papers' "on average", with the geometric one beside it. A scenario is a
file for ``dora simulate --file``.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import inf
from statistics import fmean, geometric_mean
from typing import Final

import tomli_w

from dora.config import DEFAULT_POLICY
from dora.lab.sim.figures.report import Report
from dora.lab.sim.run import simulate
from experiments.pinning.__main__ import main as pinning
from experiments.presets import NAMES, file_of, scenario_for
from experiments.tables import TABLES, Means, Setting

LARGE_GPUS: Final = 256  # from here on --large-steps after --large-warmup


@dataclass(frozen=True)
class Comparison:
    """A claim beside its measurement; ``setting`` "mean": over all settings that the claim was measured in."""

    setting: str
    quantity: str
    system: str
    over: str
    measured: float
    paper: float | None
    deviation_percent: float | None
    geometric: float | None = None  # means only
    most: float | None = None
    settings: int = 1


# ------------------------------------------------------------------------------------------------------- measurement


def compared(setting: Setting, reports: dict[str, Report]) -> Iterator[Comparison]:
    for claim in setting.claims:
        if claim.system in reports and (not claim.over or claim.over in reports):
            report = reports[claim.system]
            value = report.step_time_min if not claim.over else _ratio(claim.quantity, report, reports[claim.over])
            yield _comparison(setting.preset, claim.quantity, claim.system, claim.over, value, claim.paper)


def _ratio(quantity: str, report: Report, base: Report) -> float:
    if quantity == "speedup":
        return report.tokens_per_s / base.tokens_per_s
    rollout_min = [each.step_time_min * each.rollout_only_fraction for each in (base, report)]
    return rollout_min[0] / rollout_min[1] if rollout_min[1] > 0.0 else inf


def _comparison(
    setting: str, quantity: str, system: str, over: str, measured: float, paper: float | None
) -> Comparison:
    deviation = None if paper is None else 100 * (measured / paper - 1)
    return Comparison(setting, quantity, system, over, measured, paper, deviation)


def mean_comparisons(comparisons: Sequence[Comparison], stated: Means) -> Iterator[Comparison]:
    """Over the settings, and over the staleness bounds of a family of systems, as the papers average."""
    for (family, over), paper in stated.items():
        values = [
            each.measured
            for each in comparisons
            if each.system.partition(",")[0] == family and over in ("", each.over.partition(",")[0])
        ]
        if values:
            mean = _comparison("mean", "speedup", family, over, fmean(values), paper)
            yield Comparison(
                **asdict(mean) | {"geometric": geometric_mean(values), "most": max(values), "settings": len(values)}
            )


# ------------------------------------------------------------------------------------------------------------ output


def _run_line(system: str, report: Report) -> str:
    return (
        f"{report.preset:22} {system:26} W={report.window:<2} {report.step_time_min:7.2f} min/step"
        f" {report.rollout_only_fraction:5.0%} rollout-only {report.tokens_per_s:11,.0f} tokens/s"
        f"  work {report.work_done_over_consumed:.2f}  staleness {report.staleness_max}  ({report.wall_s:.0f} s)"
    )


def _comparison_line(each: Comparison) -> str:
    what = each.system if not each.over else f"{each.system} over {each.over}"
    paper = "" if each.paper is None else f"  paper {each.paper:6.2f}  {each.deviation_percent:+6.1f}%"
    mean = f"  geometric {each.geometric:.2f}, most {each.most:.2f}, of {each.settings}" if each.geometric else ""
    return f"  {each.setting:22} {each.quantity:16} {what:46} {each.measured:6.2f}{paper}{mean}"


def _tell(place: str) -> Callable[[float], None]:
    shown = ""

    def progress(share: float) -> None:
        nonlocal shown
        text = f"\r{place}: {share:4.0%} " + ("\r\033[K" if share >= 1.0 else "")
        if text != shown and sys.stderr.isatty():
            sys.stderr.write(text)
            sys.stderr.flush()
        shown = text

    return progress


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    tables = commands.add_parser("tables")
    tables.set_defaults(run=print_tables)
    tables.add_argument("table", choices=[*TABLES, "all"])
    tables.add_argument("--only", metavar="NAME", action="append", help="these settings alone; may be repeated")
    tables.add_argument("--system", action="append", help="these systems alone; may be repeated")
    tables.add_argument("--short", action="store_true", help="of each table the smallest setting, one step after one")
    tables.add_argument("--steps", type=int, default=6)
    tables.add_argument("--warmup", type=int, default=3)
    tables.add_argument("--large-steps", type=int, default=3, help=f"from {LARGE_GPUS} GPUs on")
    tables.add_argument("--large-warmup", type=int, default=2)
    tables.add_argument("--seed", type=int, default=0)
    tables.add_argument("--json", action="store_true", help="one object a line: runs, then comparisons")
    scenario = commands.add_parser("scenario")
    scenario.set_defaults(run=print_scenario)
    scenario.add_argument("name", choices=NAMES, metavar="NAME")
    scenario.add_argument("--policy", default=DEFAULT_POLICY)
    scenario.add_argument("--window", type=int)
    commands.add_parser("pinning", help="old rollouts pinned, mixed or discarded; it has options of its own")
    if sys.argv[1:2] == ["pinning"]:
        sys.exit(pinning(sys.argv[2:]))
    options = parser.parse_args()
    options.run(options)


def print_scenario(options: argparse.Namespace) -> None:
    print(tomli_w.dumps(file_of(scenario_for(options.name, options.policy, options.window))))


def print_tables(options: argparse.Namespace) -> None:
    for name in TABLES if options.table == "all" else (options.table,):
        print_table(name, options)


def print_table(name: str, options: argparse.Namespace) -> None:
    make, stated = TABLES[name]
    settings = [setting for setting in make() if not options.only or setting.preset in options.only]
    if options.short:
        settings = sorted(settings, key=_gpus)[:1]
    comparisons: list[Comparison] = []
    for setting in settings:
        reports: dict[str, Report] = {}
        for system, scenario in setting.systems.items():
            if options.system and system not in options.system:
                continue
            steps, warmup = _length(scenario.cluster.gpus, options)
            place = _tell(f"{setting.preset}, {system}")
            report = simulate(scenario, steps=steps, warmup=warmup, seed=options.seed, progress=place)
            reports[system] = report
            run = json.dumps({"system": system, **asdict(report)}) if options.json else _run_line(system, report)
            print(run, flush=True)
        found = list(compared(setting, reports))
        comparisons += found
        _show(found, options.json)
    if not options.short:
        _show(list(mean_comparisons(comparisons, stated)), options.json)


def _gpus(setting: Setting) -> int:
    return max(scenario.cluster.gpus for scenario in setting.systems.values())


def _length(gpus: int, options: argparse.Namespace) -> tuple[int, int]:
    """Steps measured, and steps before them."""
    if options.short:
        return 1, 1
    return (options.large_steps, options.large_warmup) if gpus >= LARGE_GPUS else (options.steps, options.warmup)


def _show(comparisons: Sequence[Comparison], as_json: bool) -> None:
    for each in comparisons:
        finite = {name: None if value == inf else value for name, value in asdict(each).items()}
        print(json.dumps(finite) if as_json else _comparison_line(each), flush=True)


if __name__ == "__main__":
    main()
