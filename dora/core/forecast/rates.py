"""Measured rates of training and generation, computed from events."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dora.core.forecast.cost import context_work
from dora.core.table import Column

LAST_STEPS = 8  # steps whose times are kept
SMOOTHING = 0.3  # weight of the newest step in the running mean of step times
SLOWEST_KEPT = 0.99  # decay of the slowest pace per step
PACE_TOKENS = 200_000.0  # tokens that give a response full weight in the running pace
ODD_PACE = 1.2  # upper limit of a response's pace, as a multiple of the mean
OFFER_WEIGHT = 1.0 / 2048  # weight of one prompt in the running means of ``LengthMix``
CLASSES_AN_OCTAVE = 4  # of response lengths
CLASSES = 24 * CLASSES_AN_OCTAVE
RARE_RESPONSES = 1e-4  # per group
GROWTH_WEIGHT = 1.0 / 64  # weight of one group in the chance that groups grow
_RESTORED = ("step_s", "tail_s", "pace_s", "slowest_s", "_publishes")


class LengthMix:
    """Running means of the predicted demand of drawn prompts' groups, by response length."""

    def __init__(self) -> None:
        self._means = np.zeros((3, CLASSES))
        self.responses, self.tokens, self.work = self._means  # views; ``work``: from cost.context_work
        self._prompts = 0

    def add(self, lengths: Sequence[float], prompt_tokens: int) -> None:
        tokens = np.maximum(1.0, lengths)
        at = _class_of(tokens)
        self._prompts += 1
        weight = max(1.0 / self._prompts, OFFER_WEIGHT)
        observed = np.empty_like(self._means)
        for place, of_each in enumerate((None, tokens, context_work(tokens, prompt_tokens))):
            observed[place] = np.bincount(at, of_each, CLASSES)
        self._means += weight * (observed - self._means)

    def snapshot(self) -> dict[str, Any]:
        """The state that survives a crash, as plain values: classes that have responses."""
        at = np.flatnonzero(self.responses)
        return {"prompts": self._prompts, "at": at.tolist(), "means": self._means[:, at].tolist()}

    def restore(self, values: Mapping[str, Any]) -> None:
        self._prompts = values["prompts"]
        self._means[:, values["at"]] = values["means"]

    def classes(self) -> Column:
        """The classes that have responses, except the rarest, in order of length."""
        return np.flatnonzero(self.responses > RARE_RESPONSES)

    def context_tokens(self) -> float:
        """Mean context of a running request."""
        return float(self.work.sum() / self.tokens.sum())


def _class_of(tokens: Column | float) -> NDArray[np.int64]:
    return np.minimum(CLASSES - 1, (CLASSES_AN_OCTAVE * np.log2(tokens)).astype(np.int64))


class Rates:
    """Running means of the time between publishes and of the seconds per token of a response; the demand of prompts."""

    def __init__(self) -> None:
        self.published_s = 0.0  # time of the newest version's publish
        self.took_s: deque[float] = deque(maxlen=LAST_STEPS)  # between the last publishes
        self.step_s = 0.0  # mean time between publishes; 0: unknown
        self.filled_s = 0.0  # the time when the last full step became full
        self.tail_s = 0.0  # mean time from there to the publish; 0: unknown
        self.pace_s = 0.0  # seconds per token; 0: unknown
        self.slowest_s = 0.0  # recent maximum of the pace at a publish, that is with the fullest workers
        self.growth = 1.0  # chance that dormant members of a group start
        self.mix = LengthMix()  # of the prompts drawn
        self._publishes = 0

    def published(self, now_s: float) -> float | None:
        """Records a publish. Returns the time since the previous one, or None for the first step, which includes the
        start-up and is not counted.
        """
        self._publishes += 1
        took_s, self.published_s = now_s - self.published_s, now_s
        self.slowest_s = max(self.pace_s, SLOWEST_KEPT * self.slowest_s)
        if self._publishes == 1:
            return None
        weight = SMOOTHING if self.step_s else 1.0
        self.took_s.append(took_s)
        self.step_s += weight * (took_s - self.step_s)
        self.tail_s += weight * (now_s - self.filled_s - self.tail_s)
        return took_s

    def filled(self, now_s: float) -> None:
        """Records that the last group of a step went to the trainer."""
        self.filled_s = now_s

    def decided(self, *, grows: bool) -> None:
        """Records whether the dormant members of a group have started or are skipped."""
        self.growth += GROWTH_WEIGHT * (grows - self.growth)

    def generated(self, tokens: int, took_s: float) -> None:
        if tokens <= 0 or took_s <= 0.0:
            return
        weight = min(1.0, tokens / PACE_TOKENS) if self.pace_s else 1.0
        pace_s = took_s / tokens
        if self.pace_s:  # a stalled response says little about the others
            pace_s = min(pace_s, ODD_PACE * self.pace_s)
        self.pace_s += weight * (pace_s - self.pace_s)

    def snapshot(self, now_s: float) -> dict[str, Any]:
        """The state that survives a crash, as plain values. Times are relative to ``now_s``."""
        values = {name: getattr(self, name) for name in _RESTORED}
        ago_s = [now_s - self.published_s, now_s - self.filled_s]
        return values | {
            "ago_s": ago_s,
            "took_s": list(self.took_s),
            "mix": self.mix.snapshot(),
            "growth": self.growth,
        }

    def restore(self, values: Mapping[str, Any], now_s: float) -> None:
        for name in _RESTORED:
            setattr(self, name, values[name])
        self.published_s, self.filled_s = (now_s - ago_s for ago_s in values["ago_s"])
        self.took_s.extend(values["took_s"])
        self.mix.restore(values["mix"])
        self.growth = values["growth"]

    @property
    def group_work(self) -> float:
        """Mean KV work of drawn prompts' groups, in context-tokens."""
        return float(self.mix.work.sum())

    def kv_step_s(self, groups: int, kv_tokens: float) -> float:
        """Duration of a step of ``groups`` groups if KV is always full: context-tokens over KV, times the pace.

        Returns 0 while it is unknown.
        """
        return groups * self.group_work / kv_tokens * self.pace_s if kv_tokens else 0.0

    def full_step_s(self, groups: int, slots: int, kv_tokens: float) -> float:
        """Duration of such a step if KV or slots are always full, whichever runs out first, or 0 if unknown."""
        slots_s = groups * float(self.mix.tokens.sum()) / slots * self.pace_s if slots else 0.0
        slower = self.slowest_s / self.pace_s if self.pace_s else 1.0
        return slower * max(slots_s, self.kv_step_s(groups, kv_tokens))
