"""Draws ``timeline.png``: reward and staleness by step, workers and requests over time. Loads Matplotlib on use."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from pathlib import Path
from statistics import fmean
from typing import Any

from dora.ops.demo.audit import StepSummary, mean_reward, quarters
from dora.ops.demo.report import DemoRun, VersionEvaluation
from dora.ops.demo.series import Sample, stretches

INK, SOFT, GRID = "#1f2933", "#7b8794", "#e4e7eb"
BLUE, ORANGE, GREEN = "#2563eb", "#d97706", "#0f9d76"
TITLE_WORKERS = (
    "Workers by policy version (hatched: joining, loading or lost; dotted: a commit; arcs: {seen} of {all} moved "
    "requests)\nTrainer: steps by the version they publish, filled height: share of the time in which it computed"
)
ARCS_MAX = 80  # more would hide the versions
SETTLED_STATES = ("ready", "vacating", "draining")  # the others are hatched: joining, loading, lost


@dataclass(frozen=True, slots=True)
class TrainerSpan:
    """One step of the trainer, in seconds since the service was ready."""

    step: int
    begin_s: float  # the previous commit
    end_s: float  # its own commit
    busy_s: float  # the part of it in which the trainer did not wait

    @property
    def busy_share(self) -> float:
        length_s = self.end_s - self.begin_s
        return min(1.0, max(0.0, self.busy_s / length_s)) if length_s > 0 else 1.0


@dataclass(frozen=True, slots=True)
class Arc:
    """Moved requests from the row that they left to the row that they came to; rows count from the top."""

    begin: tuple[float, int]  # second, row
    end: tuple[float, int]
    version: int
    requests: int


def arcs_of(samples: Sequence[Sample], rows: Mapping[str, int]) -> list[Arc]:
    """The arcs of all moves between the workers of ``rows``; the largest ``ARCS_MAX``, in order of time."""
    moves = [move for sample in samples for move in sample.moves if move.source in rows and move.target in rows]
    kept = sorted(moves, key=lambda move: -move.requests)[:ARCS_MAX]
    return [
        Arc((move.left_s, rows[move.source]), (move.came_s, rows[move.target]), move.version, move.requests)
        for move in sorted(kept, key=lambda move: (move.came_s, move.left_s, move.source, move.target))
    ]


def moved_requests(samples: Sequence[Sample]) -> tuple[int, int]:
    """Counts the moves in the samples and those that the service counted: a quick move may fall between two samples."""
    counters = samples[-1].counters if samples else {}
    counted = sum(counters.get(name, 0.0) for name in ("migrations_kv", "migrations_reprefill", "requests_resumed"))
    seen = sum(move.requests for sample in samples for move in sample.moves)
    return seen, max(seen, int(counted))


def draw_timeline(
    samples: Sequence[Sample],
    steps: Sequence[StepSummary],
    trained: Sequence[TrainerSpan],
    title: str,
    run: DemoRun,
    path: Path,
) -> None:
    """Writes the four panels to ``path``. With an empty series, its panels stay empty."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style = {
        "font.size": 10, "axes.edgecolor": GRID, "axes.labelcolor": INK, "text.color": INK, "xtick.color": SOFT,
        "ytick.color": SOFT, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    }  # fmt: skip
    with pyplot.rc_context(style):
        figure, grid = pyplot.subplot_mosaic(
            [["reward", "staleness"], ["workers", "workers"], ["requests", "requests"]],
            figsize=(13, 10.5), height_ratios=[1.1, 1.3, 0.9], layout="constrained",
        )  # fmt: skip
        figure.suptitle(title, fontsize=14, fontweight="bold", x=0.01, ha="left")
        _draw_reward(grid["reward"], steps, run.evaluated)
        _draw_staleness(grid["staleness"], steps, run.window)
        _draw_workers(grid["workers"], samples, trained)
        _draw_requests(grid["requests"], samples)
        grid["requests"].sharex(grid["workers"])
        if len(samples) > 1:
            grid["workers"].set_xlim(0, samples[-1].t_s)
        figure.savefig(path, dpi=120)
        pyplot.close(figure)


def _draw_reward(axes: Any, steps: Sequence[StepSummary], evaluated: Sequence[VersionEvaluation]) -> None:
    _panel(axes, "Mean reward (dashed: first and last quarter of the steps)", "training step", "reward")
    _whole_ticks(axes.xaxis)
    scored = [(step.step, step.mean_reward) for step in steps if step.mean_reward is not None]
    if not scored:
        return
    numbers, rewards = zip(*scored, strict=True)
    marker = "o" if len(scored) <= 25 else ""
    axes.plot(numbers, rewards, color=BLUE, alpha=0.35 if len(scored) > 10 else 1.0, marker=marker, label="step")
    if len(scored) > 10:
        axes.plot(numbers, _running_mean(rewards, 10), color=BLUE, linewidth=2.2, label="mean of 10 steps")
    held_out = [(each["version"], each["reward"]) for each in evaluated if each["reward"] is not None]
    if held_out:
        versions, means = zip(*held_out, strict=True)
        axes.plot(versions, means, color=GREEN, marker="s", linestyle=":", label="held-out prompts, by version")
    if held_out or len(scored) > 10:
        axes.legend(frameon=False, loc="upper left")
    axes.set_ylim(bottom=min(0.0, *rewards))
    for part in quarters(steps) if len(steps) >= 4 else ():
        if (mean := mean_reward(part)) is not None:
            axes.hlines(mean, part[0].step - 0.4, part[-1].step + 0.4, color=INK, linestyles=(0, (4, 3)), linewidth=1.2)
            axes.annotate(f"{mean:.2f}", (part[0].step - 0.4, mean), xytext=(0, 3), textcoords="offset points")


def _draw_staleness(axes: Any, steps: Sequence[StepSummary], window: int) -> None:
    _panel(axes, "Staleness of the trained groups", "training step", "versions")
    _whole_ticks(axes.xaxis)
    _whole_ticks(axes.yaxis)
    numbers = [step.step for step in steps]
    axes.bar(numbers, [step.staleness_max for step in steps], color=ORANGE, alpha=0.3, width=0.8, label="max")
    marker = "o" if len(steps) <= 25 else ""
    axes.plot(numbers, [step.staleness_mean for step in steps], color=ORANGE, linewidth=2, marker=marker, label="mean")
    axes.axhline(window - 1, color=INK, linestyle=(0, (4, 3)), linewidth=1, label=f"bound: window - 1 = {window - 1}")
    axes.set_ylim(0, window - 1 + 0.75)
    axes.legend(frameon=False, loc="upper left", ncols=3)


def _draw_workers(axes: Any, samples: Sequence[Sample], trained: Sequence[TrainerSpan]) -> None:
    seen, counted = moved_requests(samples)
    _panel(axes, TITLE_WORKERS.format(seen=seen, all=counted), "", "")
    axes.grid(axis="y", visible=False)
    workers = sorted({row.worker for sample in samples for row in sample.workers})
    end_s = samples[-1].t_s if samples else 1.0
    for row, worker in enumerate(workers):
        for start_s, stop_s, version, state in stretches(samples, worker):
            _draw_stretch(axes, row, (start_s, stop_s), version, state, end_s)
    for arc in arcs_of(samples, {worker: row for row, worker in enumerate(workers)}):
        _draw_arc(axes, arc)
    _draw_trainer(axes, len(workers), trained, end_s)
    axes.set_yticks(range(len(workers) + 1), [*workers, "trainer"])
    axes.set_ylim(len(workers) + 0.55, -0.75)
    _mark_commits(axes, samples)


def _draw_stretch(axes: Any, row: int, span_s: tuple[float, float], version: int, state: str, end_s: float) -> None:
    width_s = max(span_s[1] - span_s[0], end_s / 1000)
    settled = state in SETTLED_STATES and version >= 0
    axes.broken_barh(
        [(span_s[0], width_s)], (row - 0.34, 0.68), facecolor=_version_colour(version) if settled else "#f1f3f5",
        edgecolor="white" if settled else SOFT, hatch="" if settled else "////", linewidth=0.6,
    )  # fmt: skip
    if settled and width_s > end_s / 40:
        middle_s = span_s[0] + width_s / 2
        axes.text(middle_s, row, f"v{version}", ha="center", va="center", color="white", fontsize=9, fontweight="bold")


def _draw_arc(axes: Any, arc: Arc) -> None:
    """Draws an arc that leans to the right between two rows. A return to the same row passes above it."""
    begin, end = ((at_s, row + _edge(arc, row)) for at_s, row in (arc.begin, arc.end))
    bend = -0.35 if arc.begin[1] == arc.end[1] else 0.18
    style = {
        "arrowstyle": "-|>,head_width=0.16,head_length=0.34", "connectionstyle": f"arc3,rad={bend}", "color": INK,
        "alpha": 0.75, "shrinkA": 0.0, "shrinkB": 0.0, "linewidth": 0.5 + 0.3 * sqrt(arc.requests),
    }  # fmt: skip
    axes.annotate("", end, begin, arrowprops=style, zorder=4, annotation_clip=True)


def _edge(arc: Arc, row: int) -> float:
    other = arc.end[1] if row == arc.begin[1] else arc.begin[1]
    return 0.2 if other > row else -0.2 if other < row else -0.34


def _draw_trainer(axes: Any, row: int, trained: Sequence[TrainerSpan], end_s: float) -> None:
    """Draws each step. The filled height is the share of it in which the trainer computes, the colour its version."""
    for span in trained:
        begin_s = max(0.0, span.begin_s)
        width_s = max(span.end_s - begin_s, end_s / 1000)
        colour = _version_colour(span.step + 1)
        axes.broken_barh([(begin_s, width_s)], (row - 0.34, 0.68), facecolor=colour, alpha=0.25, linewidth=0.0)
        height = 0.68 * span.busy_share
        axes.broken_barh(
            [(begin_s, width_s)], (row + 0.34 - height, height), facecolor=colour, edgecolor="white", linewidth=0.6
        )
        if width_s > end_s / 50:
            axes.text(begin_s + width_s / 2, row, f"{span.step}", ha="center", va="center", color=INK, fontsize=8)


def _draw_requests(axes: Any, samples: Sequence[Sample]) -> None:
    _panel(axes, "Requests and finished groups", "seconds since the service was ready", "count")
    _whole_ticks(axes.yaxis)
    times_s = [sample.t_s for sample in samples]
    running = [sample.running for sample in samples]
    axes.fill_between(times_s, running, step="post", color=BLUE, alpha=0.15, linewidth=0)
    axes.step(times_s, running, where="post", color=BLUE, label="requests running")
    axes.step(times_s, [s.waiting for s in samples], where="post", color=SOFT, label="requests waiting")
    axes.step(times_s, [s.finished for s in samples], where="post", color=GREEN, label="groups finished, not yet taken")
    _mark_commits(axes, samples)
    axes.set_ylim(0, max([1, *running, *(s.waiting for s in samples), *(s.finished for s in samples)]) * 1.25)
    axes.legend(frameon=False, loc="upper left", ncols=3)


def _mark_commits(axes: Any, samples: Sequence[Sample]) -> None:
    commits_s = [after.t_s for before, after in pairwise(samples) if after.step > before.step]
    for commit_s in commits_s:
        axes.axvline(commit_s, color=INK, linewidth=0.8, linestyle=":", alpha=0.6 if len(commits_s) <= 25 else 0.25)


def _panel(axes: Any, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(color=GRID, linewidth=0.8)


def _whole_ticks(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, nbins=10))


def _version_colour(version: int) -> Any:
    from matplotlib import colormaps

    return colormaps["tab10"](version % 10)


def _running_mean(values: Sequence[float], width: int) -> list[float]:
    return [fmean(values[max(0, end - width) : end]) for end in range(1, len(values) + 1)]
