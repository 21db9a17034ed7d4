"""The two panels of a run's timeline, drawn on matplotlib axes: workers above, trainer below."""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import sqrt
from typing import Any, Final

from dora.lab.sim.figures.report import Span, StepSpan, Timeline

ROWS_MAX: Final = 48  # drawn workers; more rows would be thinner than a line
LABELLED_ROWS: Final = 16
ARROWS_MAX: Final = 60  # more would hide the versions and each other
BUNDLE_SHARE: Final = 1 / 40  # share of the width within which moves between the same workers form one arrow
BESIDE_MAX: Final = 8  # arrows of one such interval
ARROW_GAP: Final = BUNDLE_SHARE / BESIDE_MAX  # share of the width between them
LEGEND_MAX: Final = 16  # versions in the legend; more would widen the drawing
STEP_LINES_MAX: Final = 120
POINTS_MAX: Final = 40_000  # points of KV use over all rows
LABEL_SHARE: Final = 1 / 45  # share of the width that a span needs for its version's name
COUNTS_ROW: Final = -0.8  # vertical position of the move counts, in rows
HALF: Final = 0.42  # of a row's height; the rest is the gap to the next row
INK, SOFT, GRID, WAIT, EMPTY = "#1f2933", "#7b8794", "#e4e7eb", "#f6c6c0", "#eef0f2"
# Paul Tol's muted scheme, ordered so that neighbouring versions differ in hue and lightness.
COLOURS: Final = ("#332288", "#ddaa33", "#117733", "#cc6677", "#4aa8d8", "#882255", "#999933", "#44aa99", "#aa4499")
STALENESS: Final = ("#2f6f4f", "#8fbf6a", "#e9c46a", "#e07a3f", "#b23a48", "#6d2e46")
LEGEND: Final = {
    "frameon": False, "loc": "lower left", "bbox_to_anchor": (-0.004, 1.0), "borderaxespad": 0.2, "fontsize": 8.5,
    "handlelength": 1.2, "columnspacing": 1.1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bundle:
    """Moves between two workers at about the same time, drawn as one arrow at ``at_s``."""

    at_s: float
    source: int
    target: int
    moves: int


# ------------------------------------------------------------------------------------------------------ workers


def draw_groups(axes: Any, timeline: Timeline, rows: Sequence[int], scale: float) -> None:
    """Draws one row for each worker of ``rows``. ``scale`` is in seconds per unit of the time axis, here and below."""
    row_of = {worker: row for row, worker in enumerate(rows)}
    end_s = end_s_of(timeline)
    kv = _kv_by_worker(timeline, row_of)
    labelled = set(rows[:: -(-len(rows) // LABELLED_ROWS)] if rows else ())
    for span in timeline.spans:
        if span.worker not in row_of:
            continue
        _draw_span(axes, span, row_of[span.worker], scale, kv.get(span.worker, ([], [])))
        if span.worker in labelled and span.version >= 0 and span.end_s - span.begin_s > end_s * LABEL_SHARE:
            _label_span(axes, span, row_of[span.worker], scale, end_s)
    _draw_bundles(axes, bundled(timeline, rows), row_of, scale)
    _draw_counts(axes, timeline, scale)
    every = max(1, -(-len(rows) // 32))
    names = ["moves", *(f"w{worker}" for worker in rows[::every])]
    axes.set_yticks([COUNTS_ROW, *range(0, len(rows), every)], names, fontsize=8.5)
    axes.set_ylim(len(rows) - 0.4, COUNTS_ROW - 0.4)
    axes.tick_params(length=0)
    axes.set_ylabel("workers")
    _versions_legend(axes, sorted({span.version for span in timeline.spans if span.version >= 0}))


def _draw_span(axes: Any, span: Span, row: int, scale: float, kv: tuple[list[float], list[float]]) -> None:
    begin, width = span.begin_s / scale, (span.end_s - span.begin_s) / scale
    if span.version < 0:
        axes.broken_barh(
            [(begin, width)], (row - HALF, 2 * HALF), facecolor=EMPTY, edgecolor=SOFT, hatch="/////", linewidth=0.0
        )
        return
    colour = _colour(span.version)
    axes.broken_barh([(begin, width)], (row - HALF, 2 * HALF), facecolor=colour, alpha=0.28, linewidth=0.0)
    times, shares = _stretch(kv, span)
    if times:
        floor = row + HALF
        axes.fill_between(
            [at / scale for at in times], floor, [floor - 2 * HALF * share for share in shares],
            step="post", color=colour, alpha=0.85, linewidth=0.0,
        )  # fmt: skip


def _label_span(axes: Any, span: Span, row: int, scale: float, end_s: float) -> None:
    axes.text(
        (span.begin_s + end_s * 0.003) / scale, row - 0.36, f"v{span.version}", ha="left", va="top", fontsize=7.5,
        color=INK, clip_on=True, bbox={"facecolor": "white", "alpha": 0.65, "pad": 0.6, "linewidth": 0.0},
    )  # fmt: skip


def _draw_bundles(axes: Any, bundles: Sequence[Bundle], row_of: dict[int, int], scale: float) -> None:
    most = max((bundle.moves for bundle in bundles), default=1)
    for bundle in bundles:
        style = {
            "arrowstyle": "-|>,head_width=0.16,head_length=0.34", "color": INK, "alpha": 0.8, "shrinkA": 0.0,
            "shrinkB": 0.0, "linewidth": 0.5 + 2.0 * sqrt(bundle.moves / most),
        }  # fmt: skip
        at = bundle.at_s / scale
        axes.annotate("", (at, row_of[bundle.target]), (at, row_of[bundle.source]), arrowprops=style, zorder=4)


def _draw_counts(axes: Any, timeline: Timeline, scale: float) -> None:
    stretch_s = end_s_of(timeline) * BUNDLE_SHARE
    for place, moves in sorted(Counter(int(arrow.at_s / stretch_s) for arrow in timeline.arrows).items()):
        at = (place + 0.5) * stretch_s / scale
        axes.text(
            at, COUNTS_ROW, f"{moves:,}", ha="center", va="center", fontsize=7, color=SOFT, clip_on=True, zorder=5,
            bbox={"facecolor": "white", "pad": 0.5, "linewidth": 0.0},
        )  # fmt: skip


def _versions_legend(axes: Any, versions: Sequence[int]) -> None:
    from matplotlib.patches import Patch

    every = max(1, -(-len(versions) // LEGEND_MAX))
    handles = [Patch(facecolor=_colour(version), label=f"v{version}") for version in versions[::every]]
    handles.append(Patch(facecolor=EMPTY, edgecolor=SOFT, hatch="/////", linewidth=0.0, label="loading or none"))
    axes.legend(handles=handles, ncols=len(handles), **LEGEND)


# -------------------------------------------------------------------------------------------------------- trainer


def draw_trainer(axes: Any, steps: Sequence[StepSpan], scale: float) -> None:
    """Draws two bands by step. Upper: computing or waiting. Lower: shares of the step's groups by staleness."""
    for step in steps:
        begin, width = step.begin_s / scale, (step.end_s - step.begin_s) / scale
        axes.broken_barh([(begin, width)], (1.12, 0.8), facecolor=WAIT, linewidth=0.0)
        axes.broken_barh(
            [(left / scale, (right - left) / scale) for left, right in step.busy], (1.12, 0.8), facecolor=INK,
            linewidth=0.0,
        )  # fmt: skip
        floor, total = 0.0, max(sum(step.staleness), 1)
        for staleness, groups in enumerate(step.staleness):
            share = groups / total
            colour = STALENESS[min(staleness, len(STALENESS) - 1)]
            axes.broken_barh([(begin, width)], (floor, share * 0.92), facecolor=colour, linewidth=0.0)
            floor += share * 0.92
    _label_steps(axes, steps, scale)
    axes.set_ylim(0, 2.05)
    axes.set_yticks([0.46, 1.52], ["staleness\nof the batch", "trainer"], fontsize=8.5)
    axes.tick_params(axis="y", length=0)
    _trainer_legend(axes, max((len(step.staleness) for step in steps), default=0))


def _label_steps(axes: Any, steps: Sequence[StepSpan], scale: float) -> None:
    every = -(-len(steps) // 30)
    for step in steps[::every] if every else ():
        length_s = step.end_s - step.begin_s
        busy = sum(right - left for left, right in step.busy) / length_s if length_s > 0 else 0.0
        text = f"step {step.step}: {busy:.0%} busy" if len(steps) <= 12 else f"{step.step}"
        axes.text(
            (step.begin_s + step.end_s) / 2 / scale, 1.52, text, ha="center", va="center", fontsize=8, color=INK,
            clip_on=True, bbox={"facecolor": "white", "alpha": 0.8, "pad": 1.0, "linewidth": 0.0},
        )  # fmt: skip


def _trainer_legend(axes: Any, kinds: int) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=INK, label="computes"), Patch(facecolor=WAIT, label="waits")]
    for staleness in range(min(kinds, len(STALENESS))):
        more = "+" if staleness == len(STALENESS) - 1 < kinds - 1 else ""
        handles.append(Patch(facecolor=STALENESS[staleness], label=f"staleness {staleness}{more}"))
    axes.legend(handles=handles, ncols=len(handles), **LEGEND)


def mark_steps(panels: Sequence[Any], steps: Sequence[StepSpan], measured: int, scale: float) -> None:
    """Draws a line at every publish, and shades the warm-up, which the report excludes."""
    warm_up = steps[: max(0, len(steps) - measured)]
    for axes in panels:
        axes.vlines(
            [step.end_s / scale for step in steps[:: -(-len(steps) // STEP_LINES_MAX) or 1]],
            *axes.get_ylim(),
            color=INK,
            lw=0.7,
            ls=":",
            alpha=0.6,
        )
        if warm_up:
            axes.axvspan(0, warm_up[-1].end_s / scale, color="white", alpha=0.45, linewidth=0.0, zorder=3)


# ------------------------------------------------------------------------------------------------------ selection


def rows_of(timeline: Timeline, engines: int) -> list[int]:
    """The drawn workers: all, or ``ROWS_MAX`` evenly selected ones. More than ``engines`` may have existed."""
    workers = sorted({span.worker for span in timeline.spans}) or list(range(engines))
    if len(workers) <= ROWS_MAX:
        return workers
    return [workers[index * len(workers) // ROWS_MAX] for index in range(ROWS_MAX)]


def end_s_of(timeline: Timeline) -> float:
    """The end of the time axis; one second for an empty timeline."""
    ends = [span.end_s for span in timeline.spans] + [step.end_s for step in timeline.steps]
    return max(ends, default=0.0) or 1.0


def _kv_by_worker(timeline: Timeline, row_of: dict[int, int]) -> dict[int, tuple[list[float], list[float]]]:
    series: dict[int, tuple[list[float], list[float]]] = {}
    for at_s, worker, share in timeline.kv:
        if worker in row_of:
            times, shares = series.setdefault(worker, ([], []))
            times.append(at_s)
            shares.append(min(max(share, 0.0), 1.0))
    every = max(1, -(-sum(len(times) for times, _ in series.values()) // POINTS_MAX))
    return {worker: (times[::every], shares[::every]) for worker, (times, shares) in series.items()}


def _stretch(kv: tuple[list[float], list[float]], span: Span) -> tuple[list[float], list[float]]:
    times, shares = kv
    first, last = bisect_right(times, span.begin_s), bisect_left(times, span.end_s)
    before = shares[first - 1] if first else 0.0
    inside = shares[first:last]
    if not inside and not first:
        return [], []
    return [span.begin_s, *times[first:last], span.end_s], [before, *inside, (inside or [before])[-1]]


def bundled(timeline: Timeline, rows: Sequence[int]) -> list[Bundle]:
    """Bundles moves between drawn workers by time. Keeps the largest bundles only.

    Bundles of one interval stand side by side around the mean time of their moves.
    """
    drawn, end_s = set(rows), end_s_of(timeline)
    times: dict[tuple[int, int, int], list[float]] = {}
    for arrow in timeline.arrows:
        if arrow.source in drawn and arrow.target in drawn:
            place = int(arrow.at_s / (end_s * BUNDLE_SHARE))
            times.setdefault((place, arrow.source, arrow.target), []).append(arrow.at_s)
    beside: Counter[int] = Counter()
    kept: list[tuple[int, int, int]] = []
    for key in sorted(times, key=lambda key: (-len(times[key]), key)):
        if len(kept) < ARROWS_MAX and beside[key[0]] < BESIDE_MAX:
            beside[key[0]] += 1
            kept.append(key)
    bundles = []
    for _, together in groupby(sorted(kept), key=lambda key: key[0]):
        keys = list(together)
        moved_s = [at_s for key in keys for at_s in times[key]]
        first_s = sum(moved_s) / len(moved_s) - end_s * ARROW_GAP * (len(keys) - 1) / 2
        for number, key in enumerate(keys):
            bundles.append(Bundle(first_s + end_s * ARROW_GAP * number, key[1], key[2], len(times[key])))
    return bundles


def _colour(version: int) -> str:
    return COLOURS[version % len(COLOURS)]
