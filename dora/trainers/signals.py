"""The signals of a training step: for the whole step, and for each staleness of its responses.

Signals are computed from sums, which are added over micro-batches, so the cut of a step does not change them, up to the
rounding of float64. For quantiles, ratios are counted in bins, so the memory does not depend on the step's size.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from dora.data.mismatch import RATIO_HIGH, RATIO_LOW
from dora.data.trajectory import Trajectory
from dora.data.types import ALARM
from dora.trainers.objectives.batch import TokenBatch
from dora.trainers.objectives.surrogates import LOG_RATIO_MAX
from dora.trainers.ranks import Ranks

STALENESS_MAX: Final = 5  # this and more are combined: a commit has no room for more names
LOG_RATIO_BIN: Final = 1e-3  # a quantile of the ratios is exact within half of it, that is within 0.05%
_BINS: Final = 2 * round(LOG_RATIO_MAX / LOG_RATIO_BIN) + 1


@dataclass(frozen=True, slots=True)
class Signals:
    """Signals of a step, or of its part of one staleness. Means are over trained tokens unless stated; NaN: of none.

    The importance ratio is present policy / behaviour policy at a token, regardless of the objective's own ratio. At
    staleness 0 both have the same weights, so the rest is the gap between the engine and the trainer.
    """

    tokens_trained: int  # in the loss mask
    logprobs_invalid: int  # of these, tokens with a non-finite logprob, which are excluded from all token signals below
    clip_fraction: float  # of the trained tokens, by the objective's clipping
    ratio_p01: float  # quantiles of the importance ratio, from bins of LOG_RATIO_BIN in its logarithm
    ratio_p50: float
    ratio_p99: float
    ratio_max: float  # exact, not from bins
    # (sum w)^2 / (n sum w^2) of importance ratios w, 0 to 1: the share of fresh tokens that would estimate as well.
    # Source: Kong: *A Note on Importance Sampling using Standardized Weights*; Owen: *Monte Carlo theory, methods and
    # examples*, section 9.3.
    effective_sample: float
    logprob_gap: float  # |present - behaviour|
    logprob_gap_max: float
    mismatch_kl: float  # KL divergence of behaviour from present policy, nats a token, estimated by r - 1 - log r
    ratio_outside: float  # share of ratios outside RATIO_LOW to RATIO_HIGH
    entropy: float  # estimated by -logprob of the sampled tokens
    trajectories: int  # of all groups taken, including those without a learning signal; also for the fields below
    reward_mean: float  # over those with a valid reward
    length_mean: float  # response tokens
    queued_s: float  # mean time from a response's end until the trainer took it, by the wall clocks of both hosts

    def numbers(self) -> dict[str, float]:
        found = {each.name: float(getattr(self, each.name)) for each in fields(self)}
        return {name: value for name, value in found.items() if math.isfinite(value)}


def _no_bins() -> npt.NDArray[np.int64]:
    return np.zeros(_BINS, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """The sums from which signals are computed. ``+`` adds two parts, in any order."""

    tokens: int = 0
    finite: int = 0  # tokens with two finite logprobs
    clipped: int = 0
    ratio: float = 0.0
    ratio_squared: float = 0.0
    logprob: float = 0.0
    gap: float = 0.0
    kl: float = 0.0
    outside: int = 0
    trajectories: int = 0
    rewards: int = 0  # valid ones
    reward: float = 0.0
    length: int = 0
    queued_s: float = 0.0
    ratio_max: float = 0.0
    gap_max: float = 0.0
    bins: npt.NDArray[np.int64] = field(default_factory=_no_bins)  # (_BINS,): tokens by their log ratio

    def __add__(self, other: "Sums") -> "Sums":
        joined: dict[str, Any] = {
            each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)
        }
        joined |= {name: max(getattr(self, name), getattr(other, name)) for name in _LARGEST}
        return Sums(**joined)

    def signals(self) -> Signals:
        low, median, high = (self.ratio_quantile(share) for share in (0.01, 0.5, 0.99))
        return Signals(
            tokens_trained=self.tokens,
            logprobs_invalid=self.tokens - self.finite,
            clip_fraction=_over(self.clipped, self.tokens),
            ratio_p01=low,
            ratio_p50=median,
            ratio_p99=high,
            ratio_max=self.ratio_max if self.finite else math.nan,
            effective_sample=_over(self.ratio**2, self.finite * self.ratio_squared),
            logprob_gap=_over(self.gap, self.finite),
            logprob_gap_max=self.gap_max if self.finite else math.nan,
            mismatch_kl=_over(self.kl, self.finite),
            ratio_outside=_over(self.outside, self.finite),
            entropy=_over(-self.logprob, self.finite),
            trajectories=self.trajectories,
            reward_mean=_over(self.reward, self.rewards),
            length_mean=_over(self.length, self.trajectories),
            queued_s=_over(self.queued_s, self.trajectories),
        )

    def ratio_quantile(self, share: float) -> float:
        """The smallest ratio that is not exceeded by ``share`` (above 0, to 1) of tokens, as the middle of its bin."""
        if not self.finite:
            return math.nan
        rank = math.ceil(share * self.finite - 1e-9)  # 0.07 * 100 is a little above 7
        place = int(np.searchsorted(np.cumsum(self.bins), rank))
        return math.exp((place - _BINS // 2) * LOG_RATIO_BIN)


_LARGEST: Final = ("ratio_max", "gap_max")
_COUNTS: Final = ("tokens", "finite", "clipped", "trajectories", "rewards", "length", "outside")
_ADDED: Final = tuple(each.name for each in fields(Sums) if each.name not in (*_LARGEST, "bins"))
ByStaleness = Mapping[int, Sums]  # STALENESS_MAX also stands for more


def token_sums(batch: TokenBatch, clipped: torch.Tensor, staleness: Sequence[int]) -> ByStaleness:
    """Sums a micro-batch: ``clipped`` (n,) is from the objective's terms, ``staleness`` of each of its r rows."""
    present, behaviour = (_array(each).astype(np.float64) for each in (batch.logprobs.double(), batch.behaviour))
    of_token = np.repeat(np.minimum(staleness, STALENESS_MAX), _array(batch.lengths))
    mask, bounded = _array(batch.mask), _array(clipped)
    finite = mask & np.isfinite(present) & np.isfinite(behaviour)
    found = {}
    for each in np.unique(of_token[mask]).tolist():
        here = finite & (of_token == each)
        difference = present[here] - behaviour[here]
        log_ratios = difference.clip(-LOG_RATIO_MAX, LOG_RATIO_MAX)
        ratios, gaps = np.exp(log_ratios), np.abs(difference)
        places = np.rint(log_ratios / LOG_RATIO_BIN).astype(np.int64) + _BINS // 2
        found[each] = Sums(
            tokens=int((mask & (of_token == each)).sum()),
            finite=int(here.sum()),
            clipped=int((bounded & mask & (of_token == each)).sum()),
            ratio=float(ratios.sum()),
            ratio_squared=float((ratios**2).sum()),
            logprob=float(present[here].sum()),
            gap=float(gaps.sum()),
            kl=float((ratios - 1.0 - log_ratios).sum()),
            outside=int(((ratios < RATIO_LOW) | (ratios > RATIO_HIGH)).sum()),
            ratio_max=float(ratios.max(initial=0.0)),
            gap_max=float(gaps.max(initial=0.0)),
            bins=np.bincount(places, minlength=_BINS),
        )
    return found


def response_sums(trajectories: Iterable[Trajectory], taken_at: float) -> ByStaleness:
    """Sums responses that the trainer took at ``taken_at`` (seconds since the Unix epoch)."""
    parts: dict[int, list[Trajectory]] = {}
    for each in trajectories:
        parts.setdefault(min(each.staleness, STALENESS_MAX), []).append(each)
    return {
        staleness: Sums(
            trajectories=len(members),
            rewards=sum(_rewarded(each) for each in members),
            reward=sum(each.reward for each in members if _rewarded(each)),
            length=sum(each.length_tokens for each in members),
            queued_s=sum(max(taken_at - each.finished_at, 0.0) for each in members),
        )
        for staleness, members in parts.items()
    }


def added(one: ByStaleness, other: ByStaleness) -> dict[int, Sums]:
    empty = Sums()
    return {each: one.get(each, empty) + other.get(each, empty) for each in sorted({*one, *other})}


def whole(sums: ByStaleness) -> Signals:
    return sum(sums.values(), Sums()).signals()


def over_ranks(sums: ByStaleness, ranks: Ranks) -> ByStaleness:
    if ranks.count == 1:
        return sums
    parts = [sums.get(each, Sums()) for each in range(STALENESS_MAX + 1)]
    added_up = ranks.sum(np.array([[*(getattr(part, name) for name in _ADDED), *part.bins] for part in parts], float))
    largest = ranks.largest(np.array([[getattr(part, name) for name in _LARGEST] for part in parts], float))
    found = {}
    for each, (row, most) in enumerate(zip(added_up, largest, strict=True)):
        values: dict[str, Any] = dict(zip((*_ADDED, *_LARGEST), (*row[: len(_ADDED)], *most), strict=False))
        counts = {name: round(values[name]) for name in _COUNTS}
        part = Sums(**{**values, **counts}, bins=row[len(_ADDED) :].astype(np.int64))
        if part.tokens or part.trajectories:
            found[each] = part
    return found


def numbers_by_staleness(sums: ByStaleness) -> dict[str, float]:
    """Names finite signals ``staleness_1/clip_fraction``, and ``staleness_5+/...`` for STALENESS_MAX and more."""
    return {
        f"staleness_{each}{'+' * (each == STALENESS_MAX)}/{name}": value
        for each, part in sums.items()
        for name, value in part.signals().numbers().items()
    }


def alarm(clip_fraction: float, bound: float) -> dict[str, float]:
    """Returns the limit, for a commit's alarms, if more than ``bound`` of the tokens were clipped."""
    return {f"{ALARM}clip_fraction": bound} if clip_fraction > bound else {}


def _rewarded(trajectory: Trajectory) -> bool:
    return trajectory.reward_valid and math.isfinite(trajectory.reward)


def _over(total: float, count: float) -> float:
    return total / count if count else math.nan


def _array(values: torch.Tensor) -> npt.NDArray[Any]:
    return values.detach().cpu().numpy()
