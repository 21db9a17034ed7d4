"""Numbers for operators: rates, blackouts, steps. Bounded memory."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dora.core.forecast.adjustment import groups_to_add
from dora.data.trajectory import TrajectoryGroup
from dora.data.types import Arrival, TierLoad

BLACKOUTS_KEPT = 4096  # and as many stays in a pool
STEPS_KEPT = 512
METRICS_KEPT = 8192  # of all steps together, the latest ones: a status has them all
RATE_WINDOW_S = 5.0
ADVICE_STEPS = 8  # whose times say how many workers to add


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One committed step, as operators see it."""

    step: int
    committed_at: float
    mean_reward: float
    staleness_mean: float
    staleness_max: int
    tokens: int
    metrics: dict[str, float] = field(default_factory=dict)
    took_s: float | None = None  # since the commit before; None: the first
    waited_s: float | None = None  # of it, the trainer stood waiting for groups; None: it does not say
    staleness_groups: tuple[int, ...] = ()  # groups by staleness, from 0 on


def staleness_groups(groups: Sequence[TrajectoryGroup]) -> tuple[int, ...]:
    """How many groups are of each staleness, from 0 on."""
    found = Counter(int(group.staleness[0]) for group in groups if len(group))
    return tuple(found[staleness] for staleness in range(max(found, default=-1) + 1))


class Rate:
    """Tokens per second over the last few seconds, from a growing counter."""

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


class Telemetry:
    def __init__(self) -> None:
        self.tokens_delivered = 0
        self.tokens_reprefilled = 0
        self.tier_tokens_found = 0
        self.tier_tokens_kept = 0
        self.tier_chunks_damaged = 0
        self.tier_losses = 0
        self.trajectories_finished = 0
        self.trajectories_evaluated = 0
        self.rewards_failed = 0
        self.groups_filtered = 0
        self.messages_refused = 0
        self.kv_bytes = 0
        self.kv_fallbacks = 0
        self.pool_spilled = 0
        self.pool_dropped = 0
        self.blackouts_ms: deque[float] = deque(maxlen=BLACKOUTS_KEPT)
        self.parked_ms: deque[float] = deque(maxlen=BLACKOUTS_KEPT)
        self.steps: deque[StepRecord] = deque(maxlen=STEPS_KEPT)
        self._stepped_s = 0.0
        self.first_token_at = 0.0
        self.last_token_at = 0.0

    def tokens(self, count: int, at: float) -> None:
        if count:
            self.first_token_at = self.first_token_at or at
            self.last_token_at = at
            self.tokens_delivered += count

    def arrived(self, arrival: Arrival | None, without_token_ms: float) -> None:
        """A request got its next token, and how it came to its worker if that is the first one there."""
        if arrival == "migrated":
            self.blackouts_ms.append(without_token_ms)
        elif arrival == "parked":
            self.parked_ms.append(without_token_ms)

    def tier(self, before: TierLoad, now: TierLoad) -> None:
        """What a worker had of the shared tier when it last reported, and has now."""
        self.tier_tokens_found += max(0, now.found_tokens - before.found_tokens)
        self.tier_tokens_kept += max(0, now.kept_tokens - before.kept_tokens)
        self.tier_chunks_damaged += max(0, now.damaged_chunks - before.damaged_chunks)
        self.tier_losses += max(0, now.losses - before.losses)

    def step(
        self,
        step: int,
        groups: list[TrajectoryGroup],
        metrics: dict[str, float],
        at: float,
        stepped_s: float,
        waited_s: float | None = None,
    ) -> None:
        """``at``: of the wall clock, for people; ``stepped_s``: of a clock that is never set."""
        rewards = [reward for group in groups for reward in group.rewards[group.rewards_valid].tolist()]
        staleness = [each for group in groups for each in group.staleness.tolist()]
        took_s = stepped_s - self._stepped_s if self.steps else None
        self._stepped_s = stepped_s
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
            )
        )
        self._forget_metrics()

    def _forget_metrics(self) -> None:
        """Of the oldest steps, where all together have more than are kept."""
        kept = 0
        for position in range(len(self.steps) - 1, -1, -1):
            step = self.steps[position]
            kept += len(step.metrics)
            if kept > METRICS_KEPT and step.metrics:
                self.steps[position] = replace(step, metrics={})

    def groups_to_add(self, workers: int) -> int | None:
        """workers that would let generation keep up with training, from the latest steps; None: not known yet.

        A step in which the trainer waits takes as long as generation does, and without the waiting as long as training.
        """
        known = [(s.took_s, s.waited_s) for s in self.steps if s.took_s and s.waited_s is not None][-ADVICE_STEPS:]
        if not known or not workers:
            return None
        generation_s = float(np.mean([took_s for took_s, _ in known]))
        training_s = float(np.mean([max(took_s - waited_s, 1e-3 * took_s) for took_s, waited_s in known]))
        return groups_to_add(generation_s, training_s, workers)

    def counters(self) -> dict[str, float]:
        """Beside the core's own counters."""
        busy_s = self.last_token_at - self.first_token_at
        return {
            "tokens_generated": self.tokens_delivered,
            "tokens_reprefilled": self.tokens_reprefilled,
            "tokens_per_s": self.tokens_delivered / busy_s if busy_s > 0 else 0.0,
            "trajectories_finished": self.trajectories_finished,
            "trajectories_evaluated": self.trajectories_evaluated,
            "rewards_failed": self.rewards_failed,
            "groups_filtered": self.groups_filtered,
            "messages_refused": self.messages_refused,
            "kv_bytes": self.kv_bytes,
            "kv_fallbacks": self.kv_fallbacks,
            "tier_tokens_found": self.tier_tokens_found,
            "tier_tokens_kept": self.tier_tokens_kept,
            "tier_chunks_damaged": self.tier_chunks_damaged,
            "tier_losses": self.tier_losses,
            "pool_spilled": self.pool_spilled,
            "pool_dropped": self.pool_dropped,
            **_percentiles("blackout_ms", self.blackouts_ms),
            **_percentiles("parked_ms", self.parked_ms),
        }


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile of values named so; 0 where there are none."""
    known = np.asarray(values) if values else np.zeros(1)
    return {f"{name}_p{percent}": float(np.percentile(known, percent)) for percent in (50, 99)}
