"""Step time against mean staleness: what fresher groups cost, by window and by ``window.freshness``.

    python -m experiments.freshness [--preset dora-64] [--rollout-gpus 24 32] [--windows 1 2 3 4] [--freshness 0 0.005]
                                    [--steps 20] [--warmup 6] [--seed 0] [--scale 1] [--plot frontier.png] [--json]

With more accelerators for rollout than the preset has, generation keeps up; training scales linearly with the others.
Lengths are predicted online (``ranker``). ``--scale N`` simulates an N-th of every batch, with an N-th of the slots and
KV of an engine and steps that take as long: an N-th of the time, and more chance in every step.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, Final

from dora.lab.sim.figures.report import Report
from dora.lab.sim.presets import preset
from dora.lab.sim.run import simulate
from dora.lab.sim.scenario import Scenario
from experiments.tables import split

PREDICTOR: Final = "ranker"


def scaled(scenario: Scenario, scale: int) -> Scenario:
    """An N-th of each batch on engines with an N-th of the room; an engine step takes as long as before."""
    cluster, trainer = scenario.cluster, scenario.trainer
    per_token = {"kv_token_s": cluster.cost.kv_token_s * scale, "request_s": cluster.cost.request_s * scale}
    room = {"slots": cluster.slots // scale, "kv_tokens": cluster.kv_tokens // scale}
    smaller = cluster.model_copy(update=room | {"cost": cluster.cost.model_copy(update=per_token)})
    batch = trainer.model_copy(update={"groups_per_step": trainer.groups_per_step // scale})
    return scenario.model_copy(update={"cluster": smaller, "trainer": batch})


def scenarios(options: argparse.Namespace) -> Iterator[tuple[Scenario, int, float]]:
    """Each run's scenario, its accelerators for rollout, and its freshness."""
    made = scaled(preset(options.preset), options.scale)
    balance = made.balance.model_copy(update={"predictor": PREDICTOR})
    for gpus, size, freshness in product(options.rollout_gpus, options.windows, options.freshness):
        if size > 1 or freshness == options.freshness[0]:  # with one version there is nothing to choose
            window = made.window.model_copy(update={"size": size, "freshness": freshness})
            yield split(made.model_copy(update={"balance": balance, "window": window}), gpus), gpus, freshness


def line(report: Report, gpus: int, freshness: float) -> str:
    groups = report.staleness_groups or ()
    shares = " ".join(f"{each / sum(groups):4.0%}" for each in groups)
    return (
        f"rollout {gpus:3} W={report.window} freshness {freshness:<6g} {report.step_time_min:6.2f} min/step"
        f" waits {report.rollout_only_fraction:5.1%} staleness {report.staleness_mean:.2f} ({shares})"
        f" over bound {report.step_time_min / report.bound_consumed_min / report.work_done_over_consumed:.3f}"
    )


def draw(runs: Sequence[dict[str, Any]], file: Path) -> None:
    """Step time over mean staleness: a line for each split and freshness, a point for each window."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for gpus, freshness in sorted({(run["rollout_gpus"], run["freshness"]) for run in runs}):
        mine = [run for run in runs if (run["rollout_gpus"], run["freshness"]) == (gpus, freshness)]
        points = [(run["staleness_mean"], run["step_time_min"], run["window"]) for run in mine]
        axes.plot(*zip(*(point[:2] for point in points), strict=True), "o-", label=f"{gpus} for rollout, {freshness:g}")
        for staleness, step_min, window in points:
            axes.annotate(f"W={window}", (staleness, step_min), textcoords="offset points", xytext=(5, 4), fontsize=8)
    axes.set_xlabel("mean staleness of the groups trained on")
    axes.set_ylabel("minutes a step")
    axes.legend(title="accelerators, window.freshness", fontsize=8)
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="dora-64")
    parser.add_argument("--rollout-gpus", type=int, nargs="+", default=[24, 32])
    parser.add_argument("--windows", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--freshness", type=float, nargs="+", default=[0.0, 0.005])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    runs: list[dict[str, Any]] = []
    for scenario, gpus, freshness in scenarios(options):
        report = simulate(scenario, steps=options.steps, warmup=options.warmup, seed=options.seed)
        runs.append({"rollout_gpus": gpus, "freshness": freshness, "scale": options.scale, **asdict(report)})
        print(json.dumps(runs[-1]) if options.json else line(report, gpus, freshness), flush=True)
    if options.plot:
        draw(runs, options.plot)


if __name__ == "__main__":
    main()
