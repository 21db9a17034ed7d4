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
    shown = "Samples to the level over those of lag 0; in brackets the seeds that reached it, if others are missing."
    parts = [_rule(points), shown, _table(points)]
    if best:
        parts += [
            "**With the learning rate (in brackets) chosen for each lag** on two other seeds: steps to the level.",
            _best(points, best),
        ]
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
    """A line for each mode: its steps to the level at lag 0, and its samples over those of lag 0 by lag."""
    lags = sorted({each.lag for each in points})
    modes: dict[tuple[str, str, float], dict[int, Point]] = {}
    for each in points:
        modes.setdefault((each.task, each.objective, each.learning_rate), {})[each.lag] = each
    head = "| task | objective | learning rate | movement, nats a step | seeds | steps at lag 0 |"
    lines = [head + "".join(f" lag {lag} |" for lag in lags if lag), "|---|---|" + "---:|" * (3 + len(lags))]
    for (task, objective, rate), by_lag in modes.items():
        start = by_lag[0]
        samples = (_samples(by_lag[lag], start.seeds) if lag in by_lag else "-" for lag in lags if lag)
        cells = task, objective, f"{rate:g}", f"{start.movement:.2g}", start.seeds, f"{start.steps:.0f}", *samples
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _samples(point: Point, seeds: int) -> str:
    """Names the seeds of a point that has fewer of them, or of which some did not reach the level."""
    half = "" if point.samples.half is None else f" ± {point.samples.half:.2f}"
    seen = "" if point.reached == point.seeds == seeds else f" ({point.reached} of {point.seeds})"
    return f"{point.samples.mean:.2f}{half}{seen}"


def _best(points: Sequence[Point], best: Mapping[tuple[str, str, int], float]) -> str:
    """A line for each objective: steps to the level by lag, and in brackets the learning rate."""
    steps = {(each.task, each.objective, each.lag, each.learning_rate): each.steps for each in points}
    lags = sorted({lag for _, _, lag in best})
    lines = [f"| task | objective |{''.join(f' lag {lag} |' for lag in lags)}", "|---|---|" + "---:|" * len(lags)]
    for task, objective in sorted({(task, objective) for task, objective, _ in best}):
        cells = []
        for lag in lags:
            rate = best.get((task, objective, lag))
            found = None if rate is None else steps.get((task, objective, lag, rate))
            cells.append("-" if found is None else f"{found:.0f} ({rate:g})")
        lines.append(f"| {task} | {objective} | {' | '.join(cells)} |")
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
