"""The map as tables of Markdown and as a figure."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from experiments.convergence.plots import COLOURS, GRID, SOFT, STYLE
from experiments.staleness.report import COST_MAX, Point, costs

SHOWN: Final = 0.8, 4.0  # samples relative to lag 0
TICKS: Final = 0.8, 1.0, 1.2, 1.5, 2.0, 3.0, 4.0


def markdown(points: Sequence[Point], best: Mapping[tuple[str, str, int], float]) -> str:
    """The section of docs/convergence.md."""
    parts = [_rule(points), _table(points)]
    if best:
        parts += ["**With the learning rate chosen for each lag**, on two seeds of their own.", _best(points, best)]
    return "\n\n".join(parts) + "\n"


def _rule(points: Sequence[Point]) -> str:
    """The cost of each objective: the slope over lag x √movement, and how far it allows."""
    cost = f"{COST_MAX - 1:.0%}"
    lines = [
        "Samples are about 1 + cost x lag x √movement, by least squares for each objective.",
        "",
        f"| objective | cost | {cost} of the samples at lag x √movement |",
        "|---|---:|---:|",
    ]
    for name, slope in costs(points).items():
        lines.append(
            f"| {name} | {slope:.2g} | {(COST_MAX - 1) / slope:.2g} |" if slope > 0 else f"| {name} | 0 | any |"
        )
    return "\n".join(lines)


def _table(points: Sequence[Point]) -> str:
    head = "| task | objective | learning rate | movement, nats a step | lag | lag x √movement | steps to the level | "
    lines = [head + "samples / lag 0 | reached |", "|---|---|---:|---:|---:|---:|---:|---:|---:|"]
    for each in points:
        half = "" if each.samples.half is None else f" ± {each.samples.half:.2f}"
        samples = "1" if each.lag == 0 else f"{each.samples.mean:.2f}{half}"
        lines.append(
            f"| {each.task} | {each.objective} | {each.learning_rate:g} | {each.movement:.2g} | {each.lag} | "
            f"{each.far:.2g} | {each.steps:.0f} | {samples} | {each.reached} of {each.seeds} |"
        )
    return "\n".join(lines)


def _best(points: Sequence[Point], best: Mapping[tuple[str, str, int], float]) -> str:
    steps = {(each.task, each.objective, each.lag, each.learning_rate): each.steps for each in points}
    lines = ["| task | objective | lag | learning rate | steps to the level |", "|---|---|---:|---:|---:|"]
    for (task, objective, lag), rate in sorted(best.items()):
        found = steps.get((task, objective, lag, rate))
        lines.append(f"| {task} | {objective} | {lag} | {rate:g} | {'-' if found is None else f'{found:.0f}'} |")
    return "\n".join(lines)


def draw(points: Sequence[Point], path: Path) -> None:
    """Samples to the level over lag times the square root of movement; one colour an objective. Intervals are of the
    ratios' logarithms, and wide ones leave the figure.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        figure = pyplot.figure(figsize=(8, 4.5), layout="constrained")
        axes: Any = figure.subplots()
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_ylim(*SHOWN)
        axes.set_yticks(TICKS, [f"{each:g}" for each in TICKS])
        axes.minorticks_off()
        axes.set_xlabel("lag x √movement of the policy in a step")
        axes.set_ylabel("samples to the level / those at lag 0")
        axes.grid(color=GRID, linewidth=0.8)
        axes.axhline(COST_MAX, color=SOFT, linestyle=":", linewidth=1)
        for colour, name in zip(COLOURS[1:], sorted({each.objective for each in points}), strict=False):
            own = [each for each in points if each.objective == name and each.lag]
            means, highs = [each.samples.mean for each in own], [each.samples.high for each in own]
            lows = [mean**2 / high for mean, high in zip(means, highs, strict=True)]
            half = np.subtract(means, lows), np.subtract(highs, means)
            where = [each.far for each in own], means
            axes.errorbar(*where, yerr=half, fmt="o", markersize=4, linewidth=0.8, color=colour, label=name)
        axes.legend(frameon=False, loc="upper left")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None}, facecolor="white")
        pyplot.close(figure)
