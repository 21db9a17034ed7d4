"""The papers' tables from the simulator: what it measures beside what a paper states, and how far apart they are.

    python perf/papers.py --table dora|longcat|laminar|staleflow|streamrl|verl [--steps 6] [--warmup 3] [--only PRESET]

Every run stands on a line of its own as soon as it has ended, then what is claimed of its setting, at the end the means
over settings: arithmetic, as the papers' "on average", with the geometric one beside it. The scenarios are the presets
(dora/sim/experiments; StaleFlow's with splits of their own). Splits, engine sizes and windows are each system's, and
training time follows from the split; nothing else differs between the systems of one setting.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import inf
from statistics import fmean, geometric_mean
from typing import Final

from dora.sim import papers
from dora.sim.experiments.verl import verl_in_flight_groups
from dora.sim.presets import names, scenario_for
from dora.sim.report import Report
from dora.sim.run import simulate
from dora.sim.scenario import Scenario

LARGE_GPUS: Final = 256  # from here on --large-steps after --large-warmup


@dataclass(frozen=True)
class Claim:
    """A paper's number of one system. ``over``: what it is a ratio to; ``paper`` None: only a mean is stated."""

    quantity: str  # step_time_min, speedup (tokens a second) or rollout_speedup (time that nothing hides)
    system: str
    over: str = ""
    paper: float | None = None


@dataclass(frozen=True)
class Setting:
    """One row of a table: scenarios by the system that they stand for, and what is claimed of them."""

    preset: str
    systems: dict[str, Scenario]
    claims: tuple[Claim, ...]


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


Means = dict[tuple[str, str], float]  # by (family of systems, over): the paper's mean speed-up


# ------------------------------------------------------------------------------------------------------------ tables


def dora() -> Iterator[Setting]:
    for gpus in (64, 128):
        cells = [cell for cell in papers.DORA_STEPS if cell.gpus == gpus]
        name = f"dora-{gpus}"
        systems = {cell.policy: scenario_for(name, cell.policy) for cell in cells}
        yield Setting(
            name, systems, tuple(Claim("step_time_min", cell.policy, "", cell.step_time_min) for cell in cells)
        )


def longcat() -> Iterator[Setting]:
    for name, task in (("longcat-4096", "maths"), ("longcat-4096-agentic", "agentic")):
        systems = {policy: scenario_for(name, policy) for policy in ("sync", "dora", "laxity")}
        paper = papers.LONGCAT_ROLLOUT_SPEEDUP[task]
        claims = tuple(Claim("rollout_speedup", policy, "sync", paper) for policy in ("dora", "laxity"))
        yield Setting(name, systems, claims)


def laminar() -> Iterator[Setting]:
    baselines = [each.policy for each in papers.LAMINAR_SPEEDUPS]
    for name in (name for name in names() if name.startswith("laminar-")):
        systems = {policy: scenario_for(name, policy) for policy in ("laminar", *baselines)}
        yield Setting(name, systems, tuple(Claim("speedup", "laminar", baseline) for baseline in baselines))


# "We tune the GPU allocation ratio between rollout and training to optimal values" (paper 000, section 6.1), for every
# system: accelerators that generate, of 128, where training then takes about as long as generation was seen to.
STALEFLOW_ROLLOUT_GPUS: Final = {1: 84, 2: 81, 3: 79}  # by the bound on staleness
PARTIAL_ROLLOUT_GPUS: Final = {1: 84, 2: 81, 3: 82}  # likewise
ONE_STEP_ROLLOUT_GPUS: Final = 96


def staleflow() -> Iterator[Setting]:
    """VeRL-Async bounds staleness by what is in flight, (bound + 1) batches (paper 000, 2.2): being generated, or
    generated and not yet trained on. Slots for as much spread it evenly."""
    name = "staleflow-128"
    one_step = split(scenario_for(name, "one_step"), ONE_STEP_ROLLOUT_GPUS)
    systems = {"sync": scenario_for(name, "sync"), "one_step": one_step}
    claims: list[Claim] = []
    for staleness, rollout_gpus in STALEFLOW_ROLLOUT_GPUS.items():
        ours, peer = f"staleflow, {staleness}", f"partial, {staleness}"
        systems[ours] = split(scenario_for(name, "staleflow", staleness + 1), rollout_gpus)
        partial = split(scenario_for(name, "partial"), PARTIAL_ROLLOUT_GPUS[staleness])
        in_flight = (staleness + 1) * partial.trainer.groups_per_step
        slots = -(-in_flight * partial.workload.group_size // partial.cluster.engines)
        cluster = partial.cluster.model_copy(update={"slots": slots})
        systems[peer] = partial.model_copy(update={"cluster": cluster, "in_flight_groups": in_flight})
        claims += [Claim("speedup", ours, over) for over in ("sync", "one_step", peer)]
    yield Setting(name, systems, tuple(claims))


def split(scenario: Scenario, rollout_gpus: int) -> Scenario:
    """The scenario with so many accelerators for rollout; training scales linearly with the others."""
    cluster, trainer = scenario.cluster, scenario.trainer
    divided = cluster.model_copy(update={"rollout_gpus": rollout_gpus})
    step_s = trainer.step_s * cluster.train_gpus / divided.train_gpus
    return scenario.model_copy(update={"cluster": divided, "trainer": trainer.model_copy(update={"step_s": step_s})})


def streamrl() -> Iterator[Setting]:
    """Table 3, each row with what the row above has: Algorithm 2 in place, then apart from the trainer, then ahead."""
    name = "streamrl-128"
    colocated = scenario_for(name, "sync")
    systems = {
        "colocated": colocated,
        "skewness-aware scheduling": colocated.model_copy(update={"policy": "streamrl"}),
        "disaggregated, streaming": scenario_for(name, "streamrl", 1),
        "asynchronous": scenario_for(name, "streamrl"),
    }
    stated = papers.STREAMRL_ABLATION
    claims = (Claim("speedup", row, "colocated", stated[row]) for row in systems if row != "colocated")
    yield Setting(name, systems, tuple(claims))


def verl() -> Iterator[Setting]:
    """Its stream begins no batch ahead (staleness 0): sync, with accelerators of its own and a trainer that streams."""
    for gpus in (32, 64, 128):
        name = f"verl-async-{gpus}"
        rows = [row for row in papers.VERL_ASYNC_STEPS if row.gpus == gpus]
        systems = {row.policy: scenario_for(name, row.policy) for row in rows}
        if "stream" in systems:
            systems["stream"] = systems["stream"].model_copy(update={"policy": "sync", "window": 1})
        claims = [Claim("step_time_min", row.policy, "", row.step_s / 60) for row in rows]
        for row in (row for row in papers.VERL_STALENESS_STEPS if row.gpus == gpus):
            system = f"{row.policy}, {row.staleness}"
            trainer = systems[row.policy].trainer.model_copy(update={"step_s": row.training_s})
            fields = {"trainer": trainer, "in_flight_groups": verl_in_flight_groups(row.staleness)}
            systems[system] = systems[row.policy].model_copy(update=fields)
            claims.append(Claim("step_time_min", system, "", row.step_s / 60))
        yield Setting(name, systems, tuple(claims))


def _means(family: str, speedups: Sequence[papers.Speedup]) -> Means:
    return {(family, each.policy): each.mean for each in speedups}


TABLES: Final[dict[str, tuple[Callable[[], Iterator[Setting]], Means]]] = {
    "dora": (dora, {}),
    "longcat": (longcat, {}),
    "laminar": (laminar, _means("laminar", papers.LAMINAR_SPEEDUPS)),
    "staleflow": (staleflow, _means("staleflow", papers.STALEFLOW_SPEEDUPS)),
    "streamrl": (streamrl, {}),
    "verl": (verl, {}),
}


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
            if (each.system.partition(",")[0], each.over.partition(",")[0]) == (family, over)
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
    def progress(share: float) -> None:
        sys.stderr.write(f"\r{place}: {share:4.0%} " + ("\r\033[K" if share >= 1.0 else ""))
        sys.stderr.flush()

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
