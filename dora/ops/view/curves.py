"""Line and bar plots as SVG texts, without a library. Every text in them is escaped."""

import html
from collections.abc import Sequence
from typing import Final

WIDTH, HEIGHT = 640, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 12, 28
_COLOURS: Final = ("#2563a8", "#c2571a", "#3f8f4f", "#8a4fa3", "#777777")
_TICKS: Final = 4

Points = Sequence[tuple[float, float]]  # (x, y), ascending x


def lines(series: Sequence[tuple[str, Points]], x_name: str) -> str:
    """One line for each named series; single points are dots."""
    x_most, low, high = _bounds([points for _, points in series])
    parts = [_frame(x_most, low, high, x_name)]
    for index, (_, points) in enumerate(series):
        colour = _COLOURS[index % len(_COLOURS)]
        placed = [(_x(x, x_most), _y(y, low, high)) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if len(placed) <= 60:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in placed]
    return _svg([*parts, *_legend([name for name, _ in series])])


def bars(names: Sequence[str], rows: Sequence[tuple[float, Sequence[float]]], x_name: str) -> str:
    """A stacked bar at each x; ``names`` are those of its parts."""
    x_most, _, high = _bounds([[(x, sum(parts)) for x, parts in rows]])
    width = max(0.8, 0.8 * (WIDTH - _LEFT - _RIGHT) / max(x_most + 1, len(rows), 1))
    shapes = [_frame(x_most, 0.0, high, x_name)]
    for x, parts in rows:
        base = 0.0
        for index, value in enumerate(parts):
            top, bottom = _y(base + value, 0.0, high), _y(base, 0.0, high)
            shapes.append(
                f'<rect x="{_x(x, x_most) - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" '
                f'height="{bottom - top:.1f}" fill="{_COLOURS[index % len(_COLOURS)]}"/>'
            )
            base += value
    return _svg([*shapes, *_legend(names)])


def _bounds(series: Sequence[Points]) -> tuple[float, float, float]:
    xs = [x for points in series for x, _ in points]
    ys = [y for points in series for _, y in points]
    low, high = min([0.0, *ys]), max([0.0, *ys])
    return max([1.0, *xs]), low, high if high > low else low + 1.0


def _x(value: float, most: float) -> float:
    return _LEFT + (WIDTH - _LEFT - _RIGHT) * value / most


def _y(value: float, low: float, high: float) -> float:
    return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * (value - low) / (high - low)


def _frame(x_most: float, low: float, high: float, x_name: str) -> str:
    parts = []
    for tick in range(_TICKS + 1):
        value = low + (high - low) * tick / _TICKS
        y = _y(value, low, high)
        parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
        x = _x(x_most * tick / _TICKS, x_most)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 12}" text-anchor="middle">{x_most * tick / _TICKS:.0f}</text>')
    parts.append(f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT}" text-anchor="end">{html.escape(x_name)}</text>')
    return "".join(parts)


def _legend(names: Sequence[str]) -> list[str]:
    return [
        f'<text x="{_LEFT + 8 + 130 * index}" y="{_TOP + 8}" fill="{_COLOURS[index % len(_COLOURS)]}">'
        f"{html.escape(name)}</text>"
        for index, name in enumerate(names)
    ]


def _svg(parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT + 4}" role="img">'
    return head + "".join(parts) + "</svg>"
