"""Formatting of numbers, shares and times for people."""

from math import isfinite
from typing import Final

NONE: Final = "-"  # not measured, not given, or without a meaning


def number(value: float | None, digits: int | None = None) -> str:
    """Formats ``1234.5`` with 1 digit as ``1,234.5``; without ``digits``, a count has none and a measurement two."""
    if value is None or not isfinite(value):
        return NONE
    if digits is None:
        digits = 0 if value == int(value) else 2
    return f"{value:,.{digits}f}"


def measured(value: float) -> str:
    """Formats with four significant digits, however small the value. NaN is shown as such: operators must see it."""
    if isfinite(value) and value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}"


def percent(value: float | None, digits: int = 0) -> str:
    """Formats ``0.125`` with 1 digit as ``12.5%``."""
    return NONE if value is None or not isfinite(value) else f"{value:.{digits}%}"


def ratio(above: float, below: float) -> float | None:
    """The quotient; None if the divisor is zero."""
    return above / below if below > 0.0 else None


def duration(seconds: float) -> str:
    """Formats ``3725`` as ``1 h 2 min``, ``62`` as ``1 min 2 s``, ``1.5`` as ``1.5 s``."""
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
    if seconds >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{seconds:.1f} s"


def size(size_bytes: float) -> str:
    """Formats ``2_048_000_000`` as ``2.05 GB``, ``512`` as ``512 B``."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.3g} {unit}"
    return f"{size_bytes:.0f} B"
