"""The demo's report: a pure function of the run record, the service's counters, the trainer's list and the times."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, TypedDict

from dora.ops.demo.audit import AuditFindings, Row, Trained, audit, mean_reward, quarters, step_summaries
from dora.ops.demo.series import Shares
from dora.ops.verify import replays

NO_SHARES: Final = Shares()


class VersionEvaluation(TypedDict):
    version: Annotated[int, "the version"]
    responses: Annotated[int, "responses to the held-out prompts"]
    reward: Annotated[float | None, "their mean reward; null: none was valid"]


@dataclass(frozen=True, slots=True)
class DemoRun:
    """The data of a run besides its record and counters."""

    model: str
    window: int
    workers: int
    groups_per_step: int
    group_size: int
    steps_planned: int
    groups_open_at_end: int = 0  # admitted, not committed: the service samples while the last step trains
    groups_overdue_at_end: int = 0  # of these, groups past their deadline
    kill_worker_after_s: float | None = None  # None: no worker was to be killed
    workers_killed: int = 0
    replay_share: float = 0.0  # asked for
    replayed: Trained = field(default_factory=dict)  # groups that the trainer trained on once more, by step
    evaluated: tuple[VersionEvaluation, ...] = ()
    environment: str = ""  # that drove sessions of several turns; empty: single answers


class DemoReport(TypedDict):
    """The content of ``report.json``. Group counts and staleness come from the run record and the trainer's list."""

    model: Annotated[str, "the model"]
    window: Annotated[int, "maximum number of live policy versions, also of an adaptive window"]
    workers: Annotated[int, "rollout workers"]
    groups_per_step: Annotated[int, "prompt groups a step"]
    group_size: Annotated[int, "responses per prompt"]
    steps: Annotated[int, "steps that the trainer committed"]
    groups_admitted: Annotated[int, "groups admitted into the window"]
    groups_trained: Annotated[int, "groups that the trainer trained on"]
    groups_replayed: Annotated[int, "groups that the trainer trained on once more, in a later step"]
    groups_cancelled: Annotated[int, "groups ended without training"]
    groups_open_at_end: Annotated[int, "groups admitted but not committed when the trainer ended"]
    groups_lost: Annotated[int, "groups lost: must be 0"]
    groups_duplicated: Annotated[int, "groups trained on or delivered twice: must be 0"]
    staleness_max: Annotated[int, "largest staleness: must be at most window - 1"]
    versions_live_max: Annotated[int, "largest number of versions in the window at once"]
    two_versions_share: Annotated[
        float | None, "share of the samples up to the last commit in which engines generated for two or more versions"
    ]
    engines_idle_share: Annotated[float | None, "share of engines without a request, over the same samples"]
    c1_violations: Annotated[int, "trajectories that mixed versions: must be 0"]
    migrations_kv: Annotated[int, "requests moved with their KV cache"]
    migrations_reprefill: Annotated[int, "requests resumed elsewhere by computing their KV again"]
    migrations_failed: Annotated[int, "failed handoffs"]
    tokens_reprefilled: Annotated[int, "tokens whose KV was computed a second time"]
    tokens_generated: Annotated[int, "tokens delivered"]
    tokens_drafted: Annotated[int, "tokens that workers drafted and verified, as `--speculation` asks"]
    tokens_accepted: Annotated[int, "drafted tokens that were sampled: each saved a request one step of its engine"]
    requests_parked: Annotated[int, "requests parked in a pool"]
    requests_resumed: Annotated[int, "requests resumed from a pool, with their KV"]
    blackout_ms_p50: Annotated[float | None, "median time without tokens of a request that moved to another worker"]
    blackout_ms_p99: Annotated[float | None, "99th percentile of the same"]
    parked_ms_p50: Annotated[float | None, "median time without tokens of a request that was parked in a pool"]
    parked_ms_p99: Annotated[float | None, "99th percentile of the same"]
    workers_lost: Annotated[int, "workers whose connection broke"]
    workers_killed: Annotated[int, "workers that the demo killed, as `--kill-worker-after` asks"]
    environment: Annotated[str, "the environment that drove sessions of several turns; empty: single answers"]
    turns_ended: Annotated[int, "turns of sessions that have ended"]
    turns_resumed: Annotated[int, "next turns of sessions that began with their KV"]
    sessions_replaced: Annotated[int, "sessions that were replaced because their environment failed or was silent"]
    conversation: Annotated[str, "the session of median reward in the last step, for `dora trajectories --show`"]
    mean_reward_by_step: Annotated[list[float | None], "mean reward of each step; null where no reward was valid"]
    reward_first: Annotated[float | None, "mean reward of the first quarter of the steps"]
    reward_last: Annotated[float | None, "mean reward of the last quarter of the steps"]
    evaluated: Annotated[list[VersionEvaluation], "evaluations on prompts that are never trained on, by version"]
    answer_first: Annotated[str, "the verifier's log for the response of median reward in the first step; may be empty"]
    answer_last: Annotated[str, "the same for the last step"]
    tokens_per_s: Annotated[float, "delivered tokens/s, from the service's first reply to the last commit"]
    seconds_model: Annotated[float, "time to prepare the model"]
    seconds_start: Annotated[float, "time from there until all workers were ready"]
    seconds_first_step: Annotated[float, "time from there to the first commit, including the trainer's start"]
    seconds_later_steps: Annotated[float, "time from there to the last commit"]
    seconds_end: Annotated[float, "time from there to the end: shutdown of the workers and the audit"]
    seconds_total: Annotated[float, "time of the whole run"]
    disagreements: Annotated[list[str], "differences between the service's counters and the run record"]
    failures: Annotated[list[str], "a sentence for each violated guarantee"]
    not_done: Annotated[list[str], "a sentence for each option that had no effect"]


@dataclass(frozen=True, slots=True)
class DemoSeconds:
    """Durations of the consecutive parts of a run. A part that was not reached has none."""

    model: float
    start: float
    first_step: float
    later_steps: float
    end: float

    @property
    def rollout(self) -> float:
        """The seconds from the service's first reply to the last commit."""
        return self.first_step + self.later_steps

    @property
    def total(self) -> float:
        return self.model + self.start + self.rollout + self.end


def build_report(
    record_rows: Sequence[Row],
    counters: Mapping[str, float],
    trained: Trained,
    seconds: DemoSeconds,
    run: DemoRun,
    shares: Shares = NO_SHARES,
) -> DemoReport:
    """Returns the content of ``report.json``.

    ``groups_lost``, ``groups_duplicated``, ``c1_violations`` and ``staleness_max`` come from the run record and the
    trainer's list. ``disagreements`` lists the differences from the service's ``counters``, ``failures`` the violated
    guarantees.
    """
    found = audit(record_rows, trained)
    steps = step_summaries(record_rows, trained)
    first, last = quarters(steps)
    vanished = _vanished(counters, run)
    report: DemoReport = {
        "model": run.model,
        "window": run.window,
        "workers": run.workers,
        "groups_per_step": run.groups_per_step,
        "group_size": run.group_size,
        "steps": len(trained),
        "groups_admitted": int(counters.get("groups_admitted", 0)),
        "groups_trained": found.groups_trained,
        "groups_replayed": sum(map(len, run.replayed.values())),
        "groups_cancelled": int(counters.get("groups_cancelled", 0)),
        "groups_open_at_end": run.groups_open_at_end,
        "groups_lost": len(found.groups_lost) + run.groups_overdue_at_end + max(0, vanished),
        "groups_duplicated": len(found.groups_duplicated),
        "staleness_max": found.staleness_max,
        "versions_live_max": int(counters.get("versions_live_max", 0)),
        "two_versions_share": _rounded(shares.two_versions),
        "engines_idle_share": _rounded(shares.idle),
        "c1_violations": len(found.c1_violations),
        "migrations_kv": int(counters.get("migrations_kv", 0)),
        "migrations_reprefill": int(counters.get("migrations_reprefill", 0)),
        "migrations_failed": int(counters.get("migrations_failed", 0)),
        "tokens_reprefilled": int(counters.get("tokens_reprefilled", 0)),
        "tokens_generated": int(counters.get("tokens_generated", 0)),
        "tokens_drafted": int(counters.get("tokens_drafted", 0)),
        "tokens_accepted": int(counters.get("tokens_accepted", 0)),
        "requests_parked": int(counters.get("requests_parked", 0)),
        "requests_resumed": int(counters.get("requests_resumed", 0)),
        "blackout_ms_p50": counters.get("blackout_ms_p50"),  # None if nothing migrated
        "blackout_ms_p99": counters.get("blackout_ms_p99"),
        "parked_ms_p50": counters.get("parked_ms_p50"),
        "parked_ms_p99": counters.get("parked_ms_p99"),
        "workers_lost": int(counters.get("workers_lost", 0)),
        "workers_killed": run.workers_killed,
        "environment": run.environment,
        "turns_ended": int(counters.get("turns_ended", 0)),
        "turns_resumed": int(counters.get("turns_resumed", 0)),
        "sessions_replaced": int(counters.get("sessions_replaced", 0)),
        "conversation": steps[-1].median_id if steps and run.environment else "",
        "mean_reward_by_step": [step.mean_reward for step in steps],
        "reward_first": mean_reward(first),
        "reward_last": mean_reward(last),
        "evaluated": list(run.evaluated),
        "answer_first": steps[0].answer if steps else "",
        "answer_last": steps[-1].answer if steps else "",
        "tokens_per_s": round(counters.get("tokens_generated", 0.0) / seconds.rollout, 2) if seconds.rollout else 0.0,
        "seconds_model": round(seconds.model, 2),
        "seconds_start": round(seconds.start, 2),
        "seconds_first_step": round(seconds.first_step, 2),
        "seconds_later_steps": round(seconds.later_steps, 2),
        "seconds_end": round(seconds.end, 2),
        "seconds_total": round(seconds.total, 2),
        "disagreements": _disagreements(found, counters, vanished),
        "failures": [],
        "not_done": _not_done(run),
    }
    report["failures"] = [*_failures(report, run, found), *_replays(record_rows, trained, run)]
    return report


def _replays(rows: Sequence[Row], trained: Trained, run: DemoRun) -> Iterator[str]:
    last_steps = {
        row["group_id"]: row["behaviour_version"] + (row.get("window_versions") or run.window) - 1 for row in rows
    }
    trained_in = {group_id: step for step, group_ids in trained.items() for group_id in group_ids}
    return replays.violations(run.replayed, trained_in, last_steps)


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 4)


def _vanished(counters: Mapping[str, float], run: DemoRun) -> int:
    known = counters.get("groups_trained", 0) + counters.get("groups_cancelled", 0) + run.groups_open_at_end
    return int(counters.get("groups_admitted", 0) - known)


def _disagreements(found: AuditFindings, counters: Mapping[str, float], vanished: int) -> list[str]:
    recomputed = {
        "groups_trained": found.groups_trained,
        "staleness_max": found.staleness_max,
        "c1_violations": len(found.c1_violations),
    }
    if counters.get("groups_taken", 0) > counters.get("groups_trained", 0):
        # The service counts staleness when a step takes a group, so its maximum includes an uncommitted step.
        recomputed["staleness_max"] = max(recomputed["staleness_max"], int(counters.get("staleness_max", 0)))
    sentences = [
        f"{name}: the service counts {counters.get(name, 0):g}, run record and trainer {value}"
        for name, value in recomputed.items()
        if int(counters.get(name, 0)) != value
    ]
    if vanished:
        sentences.append(
            f"groups_admitted: {abs(vanished)} {'more' if vanished > 0 else 'fewer'} than trained, cancelled and open"
        )
    if found.staleness_misstated:
        sentences.append(
            f"staleness: {len(found.staleness_misstated)} trajectories have a staleness that is not "
            f"trained_step - behaviour_version, e.g. {found.staleness_misstated[0]}"
        )
    return sentences


def _failures(report: DemoReport, run: DemoRun, found: AuditFindings) -> list[str]:
    zeroes = {name: report[name] for name in ("groups_lost", "groups_duplicated", "c1_violations")}
    sentences = [f"{name} = {count}, must be 0" for name, count in zeroes.items() if count]
    if report["staleness_max"] > run.window - 1:
        sentences.append(f"staleness_max = {report['staleness_max']}: it must be at most window - 1 = {run.window - 1}")
    if found.trained_early:
        early = f"{len(found.trained_early)} trajectories were trained before their version was published"
        sentences.append(f"{early}, e.g. {found.trained_early[0]}")
    if report["steps"] != run.steps_planned:
        sentences.append(f"steps = {report['steps']}, must be {run.steps_planned}")
    return sentences + [f"service and run record disagree: {sentence}" for sentence in report["disagreements"]]


def _not_done(run: DemoRun) -> list[str]:
    sentences = []
    if run.kill_worker_after_s is not None and not run.workers_killed:
        sentences.append(
            f"--kill-worker-after = {run.kill_worker_after_s:g} killed no worker: none ran requests from then to the "
            "last step. Ask for an earlier time or for more steps."
        )
    if run.replay_share and not any(run.replayed.values()):
        sentences.append(
            f"--replay-share = {run.replay_share:g} replayed no group: none was within its staleness bound in a later "
            "step. Ask for a wider --window or for more steps."
        )
    return sentences
