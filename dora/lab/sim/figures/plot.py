"""Draws the timeline of a simulated run: workers over time, and the trainer's steps below. Loads Matplotlib on use.

Each worker is a row. Its colour is the hosted version, and the filled height is the share of its KV in use. An arrow
stands for requests that moved between two workers at about the same time, and its width for their number. The total
number of moves is above the rows. Hatched spans load weights or host nothing. Below, the trainer computes (dark) or
waits, and each step's batch is divided by staleness.
"""

import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from dora.errors import DoraError, InvalidValue
from dora.lab.sim.figures.panels import (
    ARROWS_MAX,
    BUNDLE_SHARE,
    GRID,
    INK,
    SOFT,
    bundled,
    draw_groups,
    draw_trainer,
    end_s_of,
    mark_steps,
    rows_of,
)
from dora.lab.sim.figures.report import Report, Timeline, step_unit
from dora.system.files import check_folder

SUFFIXES: Final = (".png", ".svg", ".html")
STYLE: Final = {
    "font.size": 10, "axes.edgecolor": GRID, "axes.labelcolor": INK, "text.color": INK, "xtick.color": SOFT,
    "ytick.color": SOFT, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "svg.fonttype": "none", "svg.hashsalt": "dora", "hatch.linewidth": 0.6,
}  # fmt: skip


def check_plot(path: Path) -> None:
    """Raises the errors that ``draw`` would raise for this file, before the run."""
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidValue("--plot", str(path), f"a file ending in {', '.join(SUFFIXES)}")
    check_folder("--plot", path)
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise DoraError("--plot needs matplotlib. Run pip install matplotlib.") from error


def draw(timeline: Timeline, report: Report, path: Path) -> None:
    """Writes the timeline to ``path``: .png, .svg, or .html that contains the SVG. Empty ones draw empty panels."""
    check_plot(path)
    suffix = path.suffix.lower()
    content = _rendered(timeline, report, "png" if suffix == ".png" else "svg")
    if suffix == ".html":
        content = _page(content.decode(), report).encode()
    try:
        path.write_bytes(content)
    except OSError as error:
        raise InvalidValue("--plot", str(path), f"a file that can be written ({error.strerror})") from error


def _rendered(timeline: Timeline, report: Report, kind: str) -> bytes:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = rows_of(timeline, report.engines)
    end_s = end_s_of(timeline)
    scale, unit = _unit(end_s)
    height = max(2.2, min(0.34 * len(rows), 9.0))
    with pyplot.rc_context(STYLE):
        figure, (groups, trainer) = pyplot.subplots(
            2, 1, sharex=True, figsize=(15, height + 2.9), height_ratios=[height, 1.25], layout="constrained"
        )
        figure.suptitle(_title(report), fontsize=13, fontweight="bold", x=0.008, ha="left")
        draw_groups(groups, timeline, rows, scale)
        draw_trainer(trainer, timeline.steps, scale)
        mark_steps((groups, trainer), timeline.steps, report.steps, scale)
        caption = _caption(timeline, report, rows)
        groups.set_title(caption, loc="left", fontsize=9.5, color=SOFT, pad=24)
        trainer.set_xlabel(f"simulated time ({unit})")
        trainer.set_xlim(0, end_s / scale)
        buffer = io.BytesIO()
        metadata = {"Date": None} if kind == "svg" else None
        figure.savefig(buffer, format=kind, dpi=130, metadata=metadata)
        pyplot.close(figure)
    return buffer.getvalue()


def _unit(end_s: float) -> tuple[float, str]:
    if end_s < 300.0:
        return 1.0, "seconds"
    return (60.0, "minutes") if end_s < 12 * 3600.0 else (3600.0, "hours")


# ----------------------------------------------------------------------------------------------------------- text


def _title(report: Report) -> str:
    over = report.step_time_min / report.bound_min if report.bound_min > 0 else 0.0
    unit = step_unit([report.step_time_min])
    bound = f", {over:.2f} x the bubble-free {unit.of_min(report.bound_min):.2f}" if over else ""
    step = f"{unit.of_min(report.step_time_min):.2f} {unit.name} a step{bound}"
    waits = f"trainer waits {report.rollout_only_fraction:.0%}"
    return f"{report.preset} · {report.policy} · window {report.window}: {step} · {waits}"


def _caption(timeline: Timeline, report: Report, rows: Sequence[int]) -> str:
    parts = ["colour: policy version; filled height: KV in use"]
    workers = len({span.worker for span in timeline.spans})
    if workers > len(rows):
        parts.append(f"{len(rows)} of {workers:,} workers shown")
    parts.append(_moves(timeline, rows))
    if len(timeline.steps) > report.steps:
        parts.append("pale: warm-up")
    if report.staleness_max is not None:
        parts.append(f"staleness at most {report.staleness_max}")
    return "   |   ".join(parts)


def _moves(timeline: Timeline, rows: Sequence[int]) -> str:
    moves, shown = len(timeline.arrows), sum(bundle.moves for bundle in bundled(timeline, rows))
    if not moves:
        return "no moves"
    scale, unit = _unit(end_s_of(timeline))
    within = f"{end_s_of(timeline) * BUNDLE_SHARE / scale:.2g} {unit}"
    return f"{ARROWS_MAX} arrows at most: {shown:,} of {moves:,} moves, bundled over {within}"


def _page(svg: str, report: Report) -> str:
    drawing = svg[svg.index("<svg") :]
    title = html.escape(_title(report))
    numbers = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(_shown(getattr(report, name)))}</td></tr>"
        for name in Report.__slots__
    )
    return (
        f"<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>{title}</title><style>"
        "body{font:14px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1500px;padding:0 1rem;color:#1f2933}"
        "svg{width:100%;height:auto}th{text-align:left;font-weight:normal;color:#7b8794;padding-right:2rem}"
        "td{text-align:right;font-variant-numeric:tabular-nums}</style></head>\n"
        f"<body>{drawing}<h2>Report</h2><table>{numbers}</table></body></html>\n"
    )


def _shown(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
