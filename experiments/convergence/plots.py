"""The two figures of docs/convergence.md, as SVG. Matplotlib loads on use."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from experiments.convergence.intervals import estimate, running_mean
from experiments.convergence.report import SMOOTHED_STEPS, Runs, Seeds, committed_s, step_curve, version_curve
from experiments.convergence.rows import BASE, SYNC, Row

INK, SOFT, GRID = "#1f2933", "#7b8794", "#e4e7eb"
COLOURS: Final = ("#1f2933", "#2563eb", "#0f9d76", "#d97706", "#a21caf", "#dc2626", "#7b8794", "#0891b2")
POINTS: Final = 100  # of a curve by the clock
STYLE: Final = {
    "font.size": 10, "font.family": "sans-serif", "svg.fonttype": "none", "svg.hashsalt": "convergence",
    "axes.edgecolor": GRID, "axes.labelcolor": INK, "text.color": INK, "xtick.color": SOFT, "ytick.color": SOFT,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
}  # fmt: skip

Curve = tuple[Sequence[float], Sequence[float]]  # x ascending, y


def draw_reward(runs: Runs, rows: Sequence[Row], level: float | None, path: Path) -> None:
    """Reward by step, by version, and by both clocks: the mean over seeds, with its 95% interval."""
    panels: list[tuple[str, str, Callable[[Row], list[Curve]]]] = [
        ("By samples: of what each step trained on", "steps trained", partial(_by_step, runs)),
        ("By samples: of what each version sampled", "steps before the version", partial(_by_version, runs)),
        ("By the clock, measured: this machine", "seconds since the first step", partial(_by_seconds, runs)),
        ("By the clock, simulated: a fleet", "hours", partial(_by_hours, runs)),
    ]

    def draw(figure: Any) -> None:
        grid = figure.subplots(2, 2, sharey=True)
        for axes, (title, x_label, curves) in zip(grid.flat, panels, strict=True):
            panel(axes, title, x_label, "reward" if axes in grid[:, 0] else "")
            for colour, row in zip(COLOURS, rows, strict=False):
                draw_mean(axes, curves(row), colour, row.title, dashed=bool(row.reward_of))
            if level is not None:
                axes.axhline(level, color=SOFT, linestyle=":", linewidth=1)
        legend(grid[1, 1] if runs.fleet_min else grid[1, 0], loc="lower right")

    drawn(draw, (11, 7.5), path)


def draw_limits(runs: Runs, modes: Sequence[Row], limits: Sequence[Row], report: Mapping[str, Any], path: Path) -> None:
    """Staleness by step, what is left of a sample by its staleness, and the rows with one thing changed."""

    def draw(figure: Any) -> None:
        staleness, left, changed = figure.subplots(1, 3)
        panel(staleness, "Staleness of what was trained on", "steps trained", "versions")
        panel(left, "Effective sample, by staleness", "staleness", "share")
        panel(changed, f"Reward, one thing changed in {BASE}", "steps trained", "reward")
        for colour, row in zip(COLOURS, modes, strict=False):
            seeds = runs.results.get(row.name, {})
            draw_mean(staleness, [_staleness_curve(each) for each in seeds.values()], colour, row.title)
            cells = report["staleness"].get(row.name, {})
            known = [(int(at), cell["effective_sample"]) for at, cell in cells.items() if cell["effective_sample"]]
            if known:
                left.plot(*zip(*known, strict=True), color=colour, marker="o", markersize=4, label=row.title)
        left.xaxis.get_major_locator().set_params(integer=True)
        legend(staleness, fontsize=8)
        compared = [row for row in modes if row.name in (SYNC, BASE)] + list(limits)
        for colour, row in zip(COLOURS, compared, strict=False):
            draw_mean(changed, _by_step(runs, row), colour, row.title, band=False)
        legend(changed, loc="lower right", fontsize=8)

    drawn(draw, (14, 4.2), path)


def drawn(draw: Callable[[Any], None], size: tuple[float, float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        figure = pyplot.figure(figsize=size, layout="constrained")
        draw(figure)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None}, facecolor="white")
        pyplot.close(figure)


def draw_mean(
    axes: Any, curves: Sequence[Curve], colour: str, label: str, dashed: bool = False, band: bool = True
) -> None:
    """The mean of ``curves`` where all of them are, with its interval; nothing without any."""
    if not curves:
        return
    x = np.unique(np.concatenate([np.asarray(each[0], float) for each in curves]))
    x = x[(x >= max(each[0][0] for each in curves)) & (x <= min(each[0][-1] for each in curves))]
    if len(x) > POINTS:
        x = np.linspace(x[0], x[-1], POINTS)
    values = np.array([np.interp(x, *each) for each in curves])
    found = [estimate([float(value) for value in column]) for column in values.T]
    means = [each.mean for each in found if each is not None]
    axes.plot(x, means, color=colour, linewidth=1.8, linestyle="--" if dashed else "-", label=label)
    if band and len(curves) > 1:
        low, high = zip(*((each.low, each.high) for each in found if each is not None), strict=True)
        axes.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)


def legend(axes: Any, **look: Any) -> None:
    """None where nothing is drawn."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, **look)


def _own(runs: Runs, row: Row) -> Seeds:
    return runs.results.get(row.name, {})


def _by_step(runs: Runs, row: Row) -> list[Curve]:
    return [(range(1, len(curve) + 1), curve) for each in _own(runs, row).values() if (curve := step_curve(each))]


def _by_version(runs: Runs, row: Row) -> list[Curve]:
    return [version_curve(each) for each in _own(runs, row).values()]


def _by_seconds(runs: Runs, row: Row) -> list[Curve]:
    return [(committed_s(each), step_curve(each)) for each in _own(runs, row).values()]


def _by_hours(runs: Runs, row: Row) -> list[Curve]:
    step_min = runs.fleet_min.get(row.name)
    if step_min is None:
        return []
    seeds = runs.results.get(row.reward_of or row.name, {})
    curves = [step_curve(each) for each in seeds.values()]
    return [([step_min / 60 * step for step in range(1, len(curve) + 1)], curve) for curve in curves]


def _staleness_curve(result: Mapping[str, Any]) -> Curve:
    values = running_mean([step["staleness_mean"] for step in result["steps"]], SMOOTHED_STEPS)
    return range(1, len(values) + 1), values


def panel(axes: Any, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(color=GRID, linewidth=0.8)
