"""The demo's report: a pure function of the record, the service's counters, the trainer's list and the time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dora.demo.audit import Audit, Row, Trained, audit, step_summaries


@dataclass(frozen=True, slots=True)
class DemoRun:
    """What is known of a run besides its record and its counters."""

    model: str
    window: int
    workers: int
    groups_per_step: int
    group_size: int
    steps_asked: int
    groups_open_at_end: int = 0  # admitted, not committed: the service goes on sampling while the last step trains
    groups_overdue_at_end: int = 0  # of these, such that no step may take any more


@dataclass(frozen=True, slots=True)
class DemoSeconds:
    """How long the run took: all of it, and from the service's first answer to the trainer's last commit."""

    total: float
    rollout: float


def build_report(
    record_rows: Sequence[Row], counters: Mapping[str, float], trained: Trained, seconds: DemoSeconds, run: DemoRun
) -> dict[str, Any]:
    """The content of ``report.json``.

    ``groups_lost``, ``groups_duplicated``, ``c1_violations`` and ``staleness_max`` come from the record and the
    trainer's list; whatever the service's ``counters`` say differently is named in ``disagreements``, every bar that
    was missed in ``failures``.
    """
    found = audit(record_rows, trained)
    vanished = _vanished(counters, run)
    report: dict[str, Any] = {
        "model": run.model,
        "window": run.window,
        "workers": run.workers,
        "groups_per_step": run.groups_per_step,
        "group_size": run.group_size,
        "steps": len(trained),
        "groups_admitted": int(counters.get("groups_admitted", 0)),
        "groups_trained": found.groups_trained,
        "groups_cancelled": int(counters.get("groups_cancelled", 0)),
        "groups_open_at_end": run.groups_open_at_end,
        "groups_lost": len(found.groups_lost) + run.groups_overdue_at_end + max(0, vanished),
        "groups_duplicated": len(found.groups_duplicated),
        "staleness_max": found.staleness_max,
        "versions_live_max": int(counters.get("versions_live_max", 0)),
        "c1_violations": len(found.c1_violations),
        "migrations_kv": int(counters.get("migrations_kv", 0)),
        "migrations_reprefill": int(counters.get("migrations_reprefill", 0)),
        "migrations_failed": int(counters.get("migrations_failed", 0)),
        "tokens_reprefilled": int(counters.get("tokens_reprefilled", 0)),
        "tokens_generated": int(counters.get("tokens_generated", 0)),
        "blackout_ms_p50": counters.get("blackout_ms_p50"),  # None where nothing migrated
        "blackout_ms_p99": counters.get("blackout_ms_p99"),
        "workers_lost": int(counters.get("workers_lost", 0)),
        "mean_reward_by_step": [summary.mean_reward for summary in step_summaries(record_rows, trained)],
        "tokens_per_s": round(counters.get("tokens_generated", 0.0) / seconds.rollout, 2) if seconds.rollout else 0.0,
        "seconds_total": round(seconds.total, 2),
    }
    report["disagreements"] = _disagreements(found, counters, vanished)
    report["failures"] = _failures(report, run)
    return report


def _vanished(counters: Mapping[str, float], run: DemoRun) -> int:
    """Admitted groups that are neither trained, nor cancelled, nor open; negative where the books hold too many."""
    known = counters.get("groups_trained", 0) + counters.get("groups_cancelled", 0) + run.groups_open_at_end
    return int(counters.get("groups_admitted", 0) - known)


def _disagreements(found: Audit, counters: Mapping[str, float], vanished: int) -> list[str]:
    recomputed = {
        "groups_trained": found.groups_trained,
        "staleness_max": found.staleness_max,
        "c1_violations": len(found.c1_violations),
    }
    if counters.get("groups_taken", 0) > counters.get("groups_trained", 0):
        # The service counts a group's staleness when a step takes it: that of a step not committed comes on top.
        recomputed["staleness_max"] = max(recomputed["staleness_max"], int(counters.get("staleness_max", 0)))
    sentences = [
        f"{name}: the service counts {counters.get(name, 0):g}, record and trainer give {value}"
        for name, value in recomputed.items()
        if int(counters.get(name, 0)) != value
    ]
    if vanished:
        sentences.append(
            f"groups_admitted: {abs(vanished)} {'more' if vanished > 0 else 'fewer'} than trained, cancelled and open"
        )
    if found.staleness_misstated:
        sentences.append(
            f"staleness: {len(found.staleness_misstated)} trajectories carry a staleness that is not "
            f"trained_step - behaviour_version, e.g. {found.staleness_misstated[0]}"
        )
    return sentences


def _failures(report: Mapping[str, Any], run: DemoRun) -> list[str]:
    sentences = [
        f"{name} = {report[name]}, must be 0"
        for name in ("groups_lost", "groups_duplicated", "c1_violations")
        if report[name]
    ]
    if report["staleness_max"] > run.window - 1:
        sentences.append(f"staleness_max = {report['staleness_max']}, must be at most window - 1 = {run.window - 1}")
    if report["steps"] != run.steps_asked:
        sentences.append(f"steps = {report['steps']}, must be {run.steps_asked}")
    return sentences + [f"service and record disagree: {sentence}" for sentence in report["disagreements"]]
