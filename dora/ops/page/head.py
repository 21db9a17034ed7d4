"""The lines above the page's charts, as `dora watch` and `dora status` word them."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from dora.ops.view.evaluation import evaluated_line, evaluation_line
from dora.ops.view.hosts import notice_rows
from dora.ops.view.metrics import alarms, metrics
from dora.ops.view.numbers import duration, measured, number
from dora.ops.view.service import (
    EVALUATED_SHOWN,
    MISMATCHES_SHOWN,
    WARNINGS_SHOWN,
    drafts_line,
    drain_rows,
    faults_of,
    filling,
    mismatch_line,
    pace,
    prompts_done,
    refusals,
    tokens_per_s,
    trainer_line,
    warning,
    window_lines,
)
from dora.rpc.dora_pb2 import Status

PLAIN: Final = ""
GOOD: Final = "good"
WARN: Final = "warn"
BAD: Final = "bad"
COUNT: Final = "count"  # a counter, which the page shows on demand
METRICS: Final = 12
COUNTERS: Final[Mapping[str, str]] = {
    "groups_admitted": "groups begun",
    "groups_trained": "groups trained on",
    "groups_cancelled": "groups cancelled",
    "migrations_kv": "moves with KV cache",
    "migrations_reprefill": "moves without it",
    "migrations_failed": "moves that failed",
    "tokens_reprefilled": "tokens computed again",
    "blackout_ms_p50": "pause of a move, median",
    "blackout_ms_p99": "pause of a move, 99th percentile",
    "workers_lost": "workers lost",
    "c1_violations": "responses with two versions",
    "groups_lost": "groups lost",
}  # with what the page calls them
PROMISES: Final = ("c1_violations", "groups_lost")  # counters that stay 0
Line = tuple[str, str, str]  # name, text, tone


def head_of(status: Status) -> list[Line]:
    """Lists faults first, then one line that sums up. Before the first status there are no lines."""
    if not status.model:
        return []
    faults, others = list(_faults(status)), list(_lines(status))
    found = [*faults, *others]
    alerts = sum(tone == BAD or (tone == WARN and name in ("workers", "ended")) for name, _, tone in found)
    kept = "broken" if any(status.counters.get(name, 0) for name in PROMISES) else "kept"
    tone = BAD if kept == "broken" else WARN if alerts else GOOD
    return [*faults, ("promises", f"{kept}, {alerts} alert{'s' * (alerts != 1)}", tone), *others]


def _lines(status: Status) -> Iterator[Line]:
    yield "model", Path(status.model).name, PLAIN
    yield "window", "; ".join(window_lines(status)), PLAIN
    yield "filling step", filling(status), PLAIN
    if status.HasField("window_wait"):
        yield "waits for", status.window_wait.reason, WARN if status.window_wait.waits_for == "agents" else PLAIN
    stalled = bool(status.trainer_stalled)
    yield "trainer", trainer_line(status).plain, BAD if stalled else PLAIN
    yield "pace", pace(status), WARN if status.dp_groups_to_add else PLAIN
    states = Counter(worker.state for worker in status.workers)
    lost = states["lost"]
    yield "workers", ", ".join(f"{count:,} {state}" for state, count in states.most_common()), WARN if lost else PLAIN
    yield "tokens/s", tokens_per_s(status.workers), PLAIN
    if drafts := drafts_line(status.counters):
        yield "drafts", drafts, PLAIN
    yield "prompts queued", f"{status.prompts_queued:,}", PLAIN
    yield "prompts done", prompts_done(status), PLAIN
    parked = sum(pool.parked for pool in status.pools)
    if status.pools:
        yield "parked requests", f"{parked:,}", PLAIN
    yield "up", duration(status.uptime_s), PLAIN
    for evaluation in status.evaluations:
        oldest = min((row.version for row in status.versions), default=0)
        yield "evaluation", evaluation_line(evaluation, oldest).plain, PLAIN
    for evaluated in status.evaluated[-EVALUATED_SHOWN:]:
        yield "evaluated", evaluated_line(evaluated), PLAIN
    for found in status.mismatches[:MISMATCHES_SHOWN]:
        yield "mismatch", mismatch_line(found), PLAIN
    for line in status.warnings[-WARNINGS_SHOWN:]:
        yield line.level, warning(line), WARN
    yield from _last_step(status)
    for name, words in COUNTERS.items():
        if name in status.counters:
            value = status.counters[name]
            broken = name in PROMISES and value > 0
            text = f"{number(value)} ms" if "_ms_" in name else number(value)
            yield words, text, BAD if broken else COUNT


def _faults(status: Status) -> Iterator[Line]:
    if faults := faults_of(status):
        yield "storage", f"{faults}; no group is admitted until it can be written", BAD
    if status.prompts_failed:
        yield "prompts", f"failed: {status.prompts_failed}", BAD
    for line in refusals(status):
        yield "version", line.plain, BAD
    for name, text in (*drain_rows(status), *notice_rows(status)):
        yield name, text, WARN
    for step in status.steps[-1:]:
        for text in alarms(step.metrics):
            yield "alarm", f"step {step.step}: {text}", BAD


def _last_step(status: Status) -> Iterator[Line]:
    for step in status.steps[-1:]:
        took = f", took {duration(step.took_s)}" if step.HasField("took_s") else ""
        yield "last step", f"{step.step}{took}", PLAIN
        yield "mean reward", measured(step.mean_reward), PLAIN
        yield "staleness", f"mean {step.staleness_mean:.2f}, largest {step.staleness_max}", PLAIN
        for name, text in metrics(step.metrics)[:METRICS]:
            yield f"trainer: {name}", text, PLAIN
