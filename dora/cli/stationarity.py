"""Whether simulated runs can be taken as stationary: short ones flatter a strategy, or do it wrong."""

from collections.abc import Sequence
from math import isfinite
from typing import Final

from dora.sim.report import Report

STEPS_LEAST: Final = 40  # measured: fewer are within a few versions of the run's start
WORK_OFF_MOST: Final = 0.01


def stationarity(reports: Sequence[Report]) -> str:
    """Why these runs cannot be taken as stationary, in a line; empty where they can."""
    steps = min(report.steps for report in reports)
    off = [report for report in reports if not _balanced(report)]
    reasons = []
    if steps < STEPS_LEAST:
        reasons.append(f"{steps} steps were measured, which should be {STEPS_LEAST} or more (--steps)")
    if off:
        whose = "" if len(reports) == 1 else f" of {', '.join(report.policy for report in off)}"
        reasons.append(f"work done over consumed{whose} is off 1 by more than {WORK_OFF_MOST:.0%}{_cancelled(off)}")
    return f"not to be taken as stationary: {'; '.join(reasons)}" if reasons else ""


def _balanced(report: Report) -> bool:
    """As much was generated as was trained on. Where nothing was measured nothing is known."""
    ratio = report.work_done_over_consumed
    return isfinite(ratio) and abs(ratio - 1.0) <= WORK_OFF_MOST


def _cancelled(reports: Sequence[Report]) -> str:
    """What is generated and cancelled is never consumed: the ratio is above 1 for good."""
    return ", cancelled groups included" if any(report.tokens_wasted_fraction > 0.0 for report in reports) else ""
