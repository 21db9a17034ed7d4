"""Figures for operators: rates, latencies, steps. Bounded memory."""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from prometheus_client import CollectorRegistry, Histogram

from dora.core import events as on
from dora.core.forecast.adjustment import groups_to_add
from dora.core.groups.window import Window
from dora.core.handoff.table import Handoff
from dora.core.state import IDLE, State
from dora.data.score import Evaluated
from dora.data.trajectory import TrajectoryGroup
from dora.data.types import Arrival, TierLoad
from dora.metrics.distribution import Distribution
from dora.orchestrator.rollout import distributions as of
from dora.orchestrator.rollout.distributions import DISTRIBUTIONS
from dora.orchestrator.rollout.responses.accepted import Accepted
from dora.orchestrator.rollout.step_times import StepTimes

STEPS_KEPT = 512
EVALUATED_KEPT = 64  # evaluations, the latest
MOVES_KEPT = 4096  # the latest
METRICS_KEPT = 8192  # of all steps together, the latest
RATE_WINDOW_S = 5.0
ADVICE_STEPS = 8  # steps whose times the advice on workers rests on
OLDER: Final = "older"  # the age of a version that has left the window


@dataclass(frozen=True, slots=True)
class StepRecord:
    step: int
    committed_at: float
    mean_reward: float
    staleness_mean: float
    staleness_max: int
    tokens: int
    metrics: dict[str, float] = field(default_factory=dict)
    took_s: float | None = None  # since the commit before; None: the first
    waited_s: float | None = None  # trainer's wait for groups within it; None: not reported
    staleness_groups: tuple[int, ...] = ()  # by staleness, from 0
    parts_s: dict[str, float] = field(default_factory=dict)  # what its time went to (data/step_parts.py)


def staleness_groups(groups: Sequence[TrajectoryGroup]) -> tuple[int, ...]:
    """Returns the number of groups of each staleness, from 0."""
    found = Counter(int(group.staleness[0]) for group in groups if len(group))
    return tuple(found[staleness] for staleness in range(max(found, default=-1) + 1))


class Rate:
    """Computes tokens per second over the last few seconds from a growing counter."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque(maxlen=1024)

    def observe(self, at: float, total: int) -> None:
        self._points.append((at, total))
        while len(self._points) > 2 and self._points[0][0] < at - RATE_WINDOW_S:
            self._points.popleft()

    def per_s(self, now: float) -> float:
        if len(self._points) < 2 or now - self._points[-1][0] > RATE_WINDOW_S:
            return 0.0
        (began, first), (ended, last) = self._points[0], self._points[-1]
        return (last - first) / (ended - began) if ended > began else 0.0


def age_of(version: int, window: Window) -> str:
    """Returns the age of a live version as a label; 0 is the newest. The window bounds the number of labels."""
    return str(window.newest - version) if version >= window.oldest_live else OLDER


RESULTS: Final = ("done", "ended", "refused", "failed")  # ended: the response ended first


class Moved(NamedTuple):
    """Labels a handoff that a worker or pool has carried out or refused."""

    kind: str
    reason: str  # one of the core's REASONS
    result: str  # one of RESULTS


@dataclass(frozen=True, slots=True)
class RecentMove:
    """Describes one such handoff, with its ``number`` from 0 and the wall-clock time ``at``."""

    number: int
    at: float
    trajectory_id: str
    source: str
    target: str
    kind: str
    reason: str
    result: str


class Telemetry:
    """Collects the figures of one service. A Prometheus exporter reads the histograms in ``registry``."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._histograms = {each.name: each.histogram(self.registry) for each in DISTRIBUTIONS}
        self.moves: Counter[Moved] = Counter()
        self.latest_moves: deque[RecentMove] = deque(maxlen=MOVES_KEPT)
        self.tokens_by_age: Counter[str] = Counter()
        self.tokens_delivered = 0
        self.tokens_reprefilled = 0
        self.tier_tokens_found = 0
        self.tier_tokens_kept = 0
        self.tier_chunks_damaged = 0
        self.tier_losses = 0
        self.trajectories_finished = 0
        self.trajectories_evaluated = 0
        self.rewards_failed = 0
        self.verdicts_cached = 0
        self.sessions_warm = 0
        self.groups_filtered = 0
        self.messages_refused = 0
        self.kv_bytes = 0
        self.kv_fallbacks = 0
        self.preemptions = 0
        self.tokens_drafted = 0
        self.tokens_accepted = 0
        self._drafts_before = 0, 0  # at the latest step
        self.pool_spilled = 0
        self.pool_dropped = 0
        self.steps: deque[StepRecord] = deque(maxlen=STEPS_KEPT)
        self.evaluated: deque[Evaluated] = deque(maxlen=EVALUATED_KEPT)  # by the service's own series
        self.step_times = StepTimes()
        self.parts_s: defaultdict[str, float] = defaultdict(float)  # of all steps
        self._stepped_s = 0.0
        self.first_token_at = 0.0
        self.last_token_at = 0.0

    def observe(self, distribution: Distribution, value: float, label: str = "") -> None:
        """Enters a value into a histogram. Any thread may call it."""
        histogram = self._histograms[distribution.name]
        (histogram.labels(label) if distribution.label else histogram).observe(value)

    def quantile_ms(self, distribution: Distribution, share: float) -> float:
        """Returns a quantile of a histogram of seconds, in milliseconds."""
        return 1000 * quantile(self._histograms[distribution.name], share)

    def session_ended(self, *, is_cached: bool, is_warm: bool) -> None:
        """Counts what an environment tells of a session that it has ended."""
        self.verdicts_cached += is_cached
        self.sessions_warm += is_warm

    def comes(self, event: on.Event, state: State, now_s: float) -> None:
        """Counts an event before the core handles it."""
        if isinstance(event, on.TurnRequested | on.SessionEnded):
            row = state.request_row.get(event.request_id)
            if row is not None and state.requests["status"][row] == IDLE:
                self.observe(of.TOOL, now_s - float(state.requests["idle_s"][row]))

    def accepted(self, accepted: Accepted, age: str = "0") -> None:
        """Counts a report's new tokens, and the pauses of responses that changed their worker. ``age`` is its
        version's.
        """
        if count := accepted.new_tokens:
            self.tokens_by_age[age] += count
            self.first_token_at = self.first_token_at or accepted.at
            self.last_token_at = accepted.at
            self.tokens_delivered += count
        for waited_s in accepted.first_tokens_s():
            self.observe(of.FIRST_TOKEN, waited_s)
        for arrival, without_token_ms in accepted.blackouts_ms():
            self.arrived(arrival, without_token_ms)

    def arrived(self, arrival: Arrival | None, without_token_ms: float) -> None:
        """Enters how long a response had no token while it went to another worker."""
        if arrival == "migrated":
            self.observe(of.BLACKOUT, without_token_ms / 1000)
        elif arrival == "parked":
            self.observe(of.PARKED, without_token_ms / 1000)

    def moved(self, handoff: Handoff, result: str) -> None:
        """Counts a handoff that a worker or pool has carried out or refused, with a ``result`` of ``Moved``."""
        moved = Moved(handoff.kind.name.lower(), handoff.reason, result)
        number = self.latest_moves[-1].number + 1 if self.latest_moves else 0
        self.moves[moved] += 1
        self.latest_moves.append(
            RecentMove(number, time.time(), handoff.request_id, handoff.source, handoff.target, *moved)
        )

    def tier(self, before: TierLoad, now: TierLoad) -> None:
        """Counts a worker's use of the shared tier between two reports."""
        self.tier_tokens_found += max(0, now.found_tokens - before.found_tokens)
        self.tier_tokens_kept += max(0, now.kept_tokens - before.kept_tokens)
        self.tier_chunks_damaged += max(0, now.damaged_chunks - before.damaged_chunks)
        self.tier_losses += max(0, now.losses - before.losses)

    def drafts_of_step(self) -> tuple[int, ...]:
        """Returns the tokens that engines drafted and accepted since the latest step, or nothing if none were."""
        drafted, accepted = self._drafts_before
        found = self.tokens_drafted - drafted, self.tokens_accepted - accepted
        return found if any(found) else ()

    def step(
        self,
        step: int,
        groups: list[TrajectoryGroup],
        metrics: dict[str, float],
        at: float,
        stepped_s: float,
        waited_s: float | None = None,
        began_s: float | None = None,
    ) -> None:
        """Enters a step. ``at`` is wall-clock time; ``stepped_s`` and the commit's ``began_s`` are monotonic."""
        rewards = [reward for group in groups for reward in group.rewards[group.rewards_valid].tolist()]
        staleness = [each for group in groups for each in group.staleness.tolist()]
        took_s = stepped_s - self._stepped_s if self.steps else None
        self._stepped_s = stepped_s
        self._drafts_before = self.tokens_drafted, self.tokens_accepted
        parts_s = self.step_times.committed(stepped_s if began_s is None else began_s, stepped_s)
        for part, time_s in parts_s.items():
            self.parts_s[part] += time_s
        self._observe_step(groups, rewards, staleness, took_s, waited_s)
        self.steps.append(
            StepRecord(
                step,
                at,
                float(np.mean(rewards)) if rewards else 0.0,
                float(np.mean(staleness)) if staleness else 0.0,
                max(staleness, default=0),
                sum(int(group.lengths.sum()) for group in groups),
                metrics,
                took_s,
                waited_s,
                staleness_groups(groups),
                parts_s,
            )
        )
        self._forget_metrics()

    def _observe_step(
        self,
        groups: Sequence[TrajectoryGroup],
        rewards: Sequence[float],
        staleness: Sequence[int],
        took_s: float | None,
        waited_s: float | None,
    ) -> None:
        lengths = [length for group in groups for length in group.lengths.tolist()]
        for distribution, values in ((of.REWARD, rewards), (of.STALENESS, staleness), (of.RESPONSE, lengths)):
            for value in values:
                self.observe(distribution, value)
        for distribution, time_s in ((of.STEP, took_s), (of.WAIT, waited_s)):
            if time_s is not None:
                self.observe(distribution, time_s)

    def _forget_metrics(self) -> None:
        kept = 0
        for position in range(len(self.steps) - 1, -1, -1):
            step = self.steps[position]
            kept += len(step.metrics)
            if kept > METRICS_KEPT and step.metrics:
                self.steps[position] = replace(step, metrics={})

    def groups_to_add(self, workers: int) -> int | None:
        """Returns the workers to add so that generation keeps up with training, or None if that is unknown.

        A step in which the trainer waits takes as long as generation, and without the waiting as long as training.
        Waiting for environments and tools does not count, because more workers do not shorten it.
        """
        steps = [(s.took_s, s.waited_s, s.parts_s.get("tools", 0.0)) for s in self.steps]
        known = [(took_s, waited_s, tools_s) for took_s, waited_s, tools_s in steps if took_s and waited_s is not None]
        if not (known := known[-ADVICE_STEPS:]) or not workers:
            return None
        generation_s = float(np.mean([took_s - min(tools_s, waited_s) for took_s, waited_s, tools_s in known]))
        training_s = float(np.mean([max(took_s - waited_s, 1e-3 * took_s) for took_s, waited_s, _ in known]))
        return groups_to_add(max(generation_s, training_s), training_s, workers)

    def latest_s(self) -> tuple[float, float]:
        """Returns the latest steps' mean seconds, and the part that waited for agents. Both are 0 before two steps."""
        known = [(step.took_s, step.parts_s.get("tools", 0.0)) for step in self.steps if step.took_s][-ADVICE_STEPS:]
        mean_s, waited_s = np.mean(known, axis=0) if known else (0.0, 0.0)
        return float(mean_s), float(waited_s)

    def counters(self) -> dict[str, float]:
        """Returns the counters beside the core's own."""
        busy_s = self.last_token_at - self.first_token_at
        return {
            "tokens_generated": self.tokens_delivered,
            "tokens_reprefilled": self.tokens_reprefilled,
            "tokens_per_s": self.tokens_delivered / busy_s if busy_s > 0 else 0.0,
            "trajectories_finished": self.trajectories_finished,
            "trajectories_evaluated": self.trajectories_evaluated,
            "rewards_failed": self.rewards_failed,
            "verdicts_cached": self.verdicts_cached,
            "sessions_warm": self.sessions_warm,
            "groups_filtered": self.groups_filtered,
            "messages_refused": self.messages_refused,
            "kv_bytes": self.kv_bytes,
            "kv_fallbacks": self.kv_fallbacks,
            "preemptions": self.preemptions,
            "tokens_drafted": self.tokens_drafted,
            "tokens_accepted": self.tokens_accepted,
            "tier_tokens_found": self.tier_tokens_found,
            "tier_tokens_kept": self.tier_tokens_kept,
            "tier_chunks_damaged": self.tier_chunks_damaged,
            "tier_losses": self.tier_losses,
            "pool_spilled": self.pool_spilled,
            "pool_dropped": self.pool_dropped,
            "blackout_ms_p50": self.quantile_ms(of.BLACKOUT, 0.5),
            "blackout_ms_p99": self.quantile_ms(of.BLACKOUT, 0.99),
            "parked_ms_p50": self.quantile_ms(of.PARKED, 0.5),
            "parked_ms_p99": self.quantile_ms(of.PARKED, 0.99),
        }


def quantile(histogram: Histogram, share: float) -> float:
    """Returns the value that ``share`` of the observations do not exceed, linear within its bucket, as in PromQL.

    Returns 0 without observations, and at most the highest finite bound.
    """
    samples = [sample for metric in histogram.collect() for sample in metric.samples if sample.name.endswith("_bucket")]
    buckets = [(0.0, 0.0), *((float(sample.labels["le"]), sample.value) for sample in samples)]
    rank = share * buckets[-1][1]
    for (low_s, below), (high_s, up_to) in pairwise(buckets[:-1]):
        if below < up_to and rank <= up_to:
            return low_s + (high_s - low_s) * (rank - below) / (up_to - below)
    return buckets[-2][0] if rank else 0.0
