"""The lines above the page's charts, as `dora watch` and `dora status` word them."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from dora.ops.view.evaluation import evaluation_line
from dora.ops.view.metrics import alarms, metrics
from dora.ops.view.numbers import duration, measured, number
from dora.ops.view.service import (
    drain_rows,
    faults_of,
    filling,
    pace,
    refusals,
    tokens_per_s,
    trainer_line,
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
Line = tuple[str, str, str]  # name, text, tone


def head_of(status: Status) -> list[Line]:
    """Faults come first. Without a status yet: empty."""
    return list(_lines(status)) if status.model else []


def _lines(status: Status) -> Iterator[Line]:
    yield from _faults(status)
    yield "window", "; ".join(window_lines(status)), PLAIN
    yield "filling step", filling(status), PLAIN
    stalled = bool(status.trainer_stalled)
    yield "trainer", trainer_line(status).plain, BAD if stalled else PLAIN
    yield "pace", pace(status), WARN if status.dp_groups_to_add else PLAIN
    states = Counter(worker.state for worker in status.workers)
    lost = states["lost"]
    yield "workers", ", ".join(f"{count:,} {state}" for state, count in states.most_common()), WARN if lost else PLAIN
    yield "tokens/s", tokens_per_s(status.workers), PLAIN
    yield "prompts queued", f"{status.prompts_queued:,}", PLAIN
    parked = sum(pool.parked for pool in status.pools)
    if status.pools:
        yield "parked requests", f"{parked:,}", PLAIN
    yield "up", duration(status.uptime_s), PLAIN
    for evaluation in status.evaluations:
        oldest = min((row.version for row in status.versions), default=0)
        yield "evaluation", evaluation_line(evaluation, oldest).plain, PLAIN
    yield from _last_step(status)
    for name, words in COUNTERS.items():
        if name in status.counters:
            value = status.counters[name]
            broken = name in ("c1_violations", "groups_lost") and value > 0
            text = f"{number(value)} ms" if "_ms_" in name else number(value)
            yield words, text, BAD if broken else COUNT


def _faults(status: Status) -> Iterator[Line]:
    if faults := faults_of(status):
        yield "storage", f"{faults}; no group is admitted until it can be written", BAD
    if status.prompts_failed:
        yield "prompts", f"failed: {status.prompts_failed}", BAD
    for line in refusals(status):
        yield "version", line.plain, BAD
    for name, text in drain_rows(status):
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
            yield name, text, PLAIN
