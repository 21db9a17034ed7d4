"""The metrics of a service, beside its counters and histograms."""

from collections.abc import Mapping
from typing import Final, TypeAlias

from dora.core.rules.precision import is_full
from dora.data.counters import COUNTERS
from dora.data.step_parts import PARTS
from dora.metrics.declaration import DeclaredMetric
from dora.orchestrator.metrics.readings import ServiceReadings as Seen
from dora.orchestrator.metrics.requests import longest_idle_s

Metric: TypeAlias = DeclaredMetric[Seen]

AGE: Final = "age 0 is the newest version"
WINDOW: Final = (
    Metric("dora_window_versions", "Versions that may be live at once.", lambda seen: seen.window.size),
    Metric("dora_version_newest", "The newest version.", lambda seen: seen.window.newest),
    Metric("dora_version_oldest", "The oldest live version.", lambda seen: seen.window.oldest_live),
    Metric("dora_versions", "Live versions by state.", lambda seen: seen.version_states(), ("state",)),
    Metric("dora_step", "The step that is being filled.", lambda seen: seen.window.step),
    Metric(
        "dora_step_groups", "Groups of a step; 0 until a trainer sets it.", lambda seen: seen.window.groups_per_step
    ),
    Metric("dora_step_groups_missing", "Groups that the step still takes.", lambda seen: seen.window.left),
    Metric(
        "dora_groups",
        f"Admitted groups that no step has taken; {AGE}.",
        lambda seen: seen.groups_by_age(),
        ("age", "state"),
    ),
)
REQUESTS: Final = (
    Metric(
        "dora_prompts_queued",
        "Prompts that wait: queued, or drawn and not admitted.",
        lambda seen: len(seen.runtime.feed) + len(seen.state.backlog),
    ),
    Metric(
        "dora_requests",
        f"Requests by state, of which `idle` is tool time; {AGE}.",
        lambda seen: seen.requests,
        ("state", "age"),
    ),
    Metric(
        "dora_tokens_generated_total",
        f"Tokens delivered; {AGE}, `older` has left the window.",
        lambda seen: seen.tokens_by_age(),
        ("age",),
    ),
    Metric(
        "dora_session_idle_longest_seconds",
        "Time for which a session has waited for its environment, the longest.",
        lambda seen: longest_idle_s(seen.state, seen.now_s),
    ),
    Metric(
        "dora_environment_drivers", "Calls that drive environments.", lambda seen: seen.runtime.environments.attendees
    ),
    Metric("dora_evaluations", "Running evaluations.", lambda seen: len(seen.runtime.evaluations.running)),
)
FLEET: Final = (
    Metric("dora_workers", "Workers by state.", lambda seen: seen.worker_states(), ("state",)),
    Metric(
        "dora_version_workers",
        f"Workers that serve or load a version; {AGE}.",
        lambda seen: seen.workers_by_age(),
        ("age", "state"),
    ),
    Metric("dora_hosts", "Hosts by state.", lambda seen: seen.host_states(), ("state",)),
    Metric(
        "dora_hosts_gone_total",
        "Hosts that left or were lost, by cause: `notice` of their scheduler, `operator`, `lease`, `connection` or "
        "`fault`.",
        lambda seen: {(cause,): float(count) for cause, count in seen.runtime.hosts.gone.items()},
        ("cause",),
    ),
    Metric(
        "dora_slots", "Requests that all workers can decode at once.", lambda seen: sum(w.slots for w in seen.workers)
    ),
    Metric("dora_engine_waiting", "Requests queued inside engines.", lambda seen: sum(w.waiting for w in seen.workers)),
    Metric("dora_kv_capacity_tokens", "KV of all workers.", lambda seen: sum(w.kv_tokens for w in seen.workers)),
    Metric("dora_kv_used_tokens", "KV in use.", lambda seen: sum(w.kv_used for w in seen.workers)),
    Metric(
        "dora_kv_use_max_ratio",
        "Share of a worker's KV in use, of the fullest worker.",
        lambda seen: max((w.kv_used / w.kv_tokens for w in seen.workers), default=0.0),
    ),
    Metric(
        "dora_kv_pressed_workers",
        "Workers whose KV use is above `balance.pressure`.",
        lambda seen: sum(w.kv_used > seen.state.config.balance.pressure * w.kv_tokens for w in seen.workers),
    ),
    Metric("dora_pools", "Pools by state.", lambda seen: seen.pool_states(), ("state",)),
    Metric("dora_pool_memory_bytes", "Memory that pools use.", lambda seen: seen.pool_bytes("memory_bytes")),
    Metric(
        "dora_pool_memory_limit_bytes",
        "Memory that pools may use.",
        lambda seen: sum(pool.capability.memory_bytes for pool in seen.runtime.sessions.pools.values()),
    ),
    Metric("dora_pool_spill_bytes", "KV that pools have on disk.", lambda seen: seen.pool_bytes("spill_bytes")),
    Metric(
        "dora_moves_total",
        "Handoffs that workers have carried out or refused: `kind` move, park, resume, or carry from pool to pool; "
        "`reason` why the core began it; `result` done, ended (the response ended first), refused or failed.",
        lambda seen: seen.moves(),
        ("kind", "reason", "result"),
    ),
)
TRAINER: Final = (
    Metric("dora_trainer_attached", "1 while a trainer is attached.", lambda seen: bool(seen.runtime.trainers.shown())),
    Metric(
        "dora_trainer_waiting",
        "1 while the trainer reads a step that lacks groups.",
        lambda seen: seen.runtime.trainers.stream is not None and seen.window.left > 0,
    ),
    Metric(
        "dora_trainer_stalled", "1 if another trainer may attach unasked.", lambda seen: bool(seen.state.lease.lapsed)
    ),
    Metric(
        "dora_commit_timestamp_seconds",
        "Time of the last commit, since the Unix epoch.",
        lambda seen: seen.of_step("committed_at"),
    ),
    Metric(
        "dora_step_part_seconds_total",
        "Time between commits by what it went to, of all steps (`dora/data/step_parts.py`).",
        lambda seen: {(part,): seen.runtime.telemetry.parts_s[part] for part in PARTS},
        ("part",),
    ),
    Metric("dora_step_reward_mean", "Mean reward of the last step.", lambda seen: seen.of_step("mean_reward")),
    Metric("dora_step_staleness_mean", "Mean staleness of the last step.", lambda seen: seen.of_step("staleness_mean")),
    Metric("dora_step_tokens", "Response tokens of the last step.", lambda seen: seen.of_step("tokens")),
    Metric(
        "dora_trainer_signal",
        "The metrics that the trainer sent with its last commit, off-policy signals among them, by name.",
        lambda seen: seen.signals(),
        ("name",),
    ),
    Metric(
        "dora_mismatch_kl",
        "KL divergence of the engines' policy from the trainer's, of the last version that it measured, nats a token.",
        lambda seen: seen.mismatch("kl"),
    ),
    Metric(
        "dora_mismatch_ratio_outside",
        "Share of importance ratios outside 0.8 to 1.25, of the same version.",
        lambda seen: seen.mismatch("ratio_outside"),
    ),
    Metric(
        "dora_full_precision",
        "1 if the newest version has fallen back from `workers.quantisation` or `workers.kv_dtype`.",
        lambda seen: is_full(seen.state, seen.window.newest),
    ),
    Metric(
        "dora_workers_to_add",
        "Workers that generation lacks to keep up with training.",
        lambda seen: seen.runtime.status.workers_to_add(),
    ),
)
PROCESS: Final = (
    Metric("dora_uptime_seconds", "Time since the start.", lambda seen: seen.now_s - seen.runtime.status.started_s),
    Metric(
        "dora_restarts", "Starts of this state folder's service before.", lambda seen: seen.runtime.incarnation.number
    ),
    Metric("dora_draining", "1 while the service admits no prompts.", lambda seen: seen.runtime.feed.closed),
    Metric("dora_clock_timestamp_seconds", "The service's clock, since the Unix epoch.", lambda seen: seen.at),
    Metric(
        "dora_clock_ahead_seconds",
        "Difference of a worker's clock, with the time of its report on the way: the largest.",
        lambda seen: seen.clock_ahead_s(),
    ),
    Metric(
        "dora_journal_waiting_records",
        "Log records that are not durable yet.",
        lambda seen: seen.runtime.journal.appended - seen.runtime.journal.durable,
    ),
    Metric(
        "dora_journal_waiting_bytes",
        "Their bytes.",
        lambda seen: 0 if seen.runtime.journal.log is None else seen.runtime.journal.log.waiting_bytes,
    ),
    Metric("dora_storage_fault", "1 while a folder cannot be written.", lambda seen: seen.faults(), ("place",)),
    Metric(
        "dora_storage_free_bytes",
        "Free bytes of a folder's file system.",
        lambda seen: {(place,): free for place, free in seen.free.items()},
        ("place",),
    ),
)

# Counters of ``dora status`` that are momentary; the others grow, and become ``dora_..._total``.
GAUGES: Final[Mapping[str, str]] = {
    "groups_lost": "dora_groups_lost",
    "groups_open": "dora_groups_open",
    "handoffs_now": "dora_handoffs",
    "kv_tokens_parked": "dora_kv_parked_tokens",
    "requests_parked_now": "dora_requests_parked",
    "staleness_max": "dora_staleness_max_steps",
    "versions_live_max": "dora_versions_live_max",
}
# Shown by a histogram, by a rate, or with labels.
OTHERWISE: Final = (
    "blackout_ms_p50",
    "blackout_ms_p99",
    "parked_ms_p50",
    "parked_ms_p99",
    "tokens_generated",
    "tokens_per_s",
)


def _counter(name: str, meaning: str) -> Metric:
    metric = GAUGES.get(name, f"dora_{name}_total")
    return Metric(metric, f"{meaning[0].upper()}{meaning[1:]}.", lambda seen: seen.counters[name])


COUNTED: Final = tuple(_counter(name, meaning) for name, meaning in COUNTERS.items() if name not in OTHERWISE)
SERVICE: Final = (*WINDOW, *REQUESTS, *FLEET, *TRAINER, *PROCESS, *COUNTED)
