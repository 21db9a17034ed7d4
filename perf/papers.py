"""The papers' tables from the simulator: what it measures beside what a paper states, and how far apart they are.

    python perf/papers.py --table dora|longcat|laminar|tools|staleflow|streamrl|verl [--steps 6] [--only PRESET]

Every run stands on a line of its own as soon as it has ended, then what is claimed of its setting, at the end the means
over settings: arithmetic, as the papers' "on average", with the geometric one beside it.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import inf
from statistics import fmean, geometric_mean
from typing import Final

from paper_tables import TABLES, Means, Setting

from dora.sim.report import Report
from dora.sim.run import simulate

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
    parser.add_argument("--table", required=True, choices=TABLES)
    parser.add_argument("--only", metavar="PRESET", action="append", help="these settings alone; may be repeated")
    parser.add_argument("--system", action="append", help="these systems alone; may be repeated")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--large-steps", type=int, default=3, help=f"from {LARGE_GPUS} GPUs on")
    parser.add_argument("--large-warmup", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one object a line: runs, then comparisons")
    options = parser.parse_args()
    make, stated = TABLES[options.table]
    settings = [setting for setting in make() if not options.only or setting.preset in options.only]
    if not settings:
        parser.error(f"--only {', '.join(options.only)}: one of {', '.join(each.preset for each in make())}")
    comparisons: list[Comparison] = []
    for setting in settings:
        reports: dict[str, Report] = {}
        for system, scenario in setting.systems.items():
            if options.system and system not in options.system:
                continue
            large = scenario.cluster.gpus >= LARGE_GPUS
            steps, warmup = (options.large_steps, options.large_warmup) if large else (options.steps, options.warmup)
            place = _tell(f"{setting.preset}, {system}")
            report = simulate(scenario, steps=steps, warmup=warmup, seed=options.seed, progress=place)
            reports[system] = report
            run = json.dumps({"system": system, **asdict(report)}) if options.json else _run_line(system, report)
            print(run, flush=True)
        found = list(compared(setting, reports))
        comparisons += found
        _show(found, options.json)
    _show(list(mean_comparisons(comparisons, stated)), options.json)


def _show(comparisons: Sequence[Comparison], as_json: bool) -> None:
    for each in comparisons:
        finite = {name: None if value == inf else value for name, value in asdict(each).items()}
        print(json.dumps(finite) if as_json else _comparison_line(each), flush=True)


if __name__ == "__main__":
    main()
