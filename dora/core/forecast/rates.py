"""How fast training and generation go, as seen from the events."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dora.core.forecast.cost import context_work
from dora.core.table import Column

LAST_STEPS = 8  # whose times are kept
SMOOTHING = 0.3  # weight of the newest step in the running mean of step times
SLOWEST_KEPT = 0.99  # of the slowest pace, each step
PACE_TOKENS = 200_000.0  # a response's weight in the running pace is its tokens over this
ODD_PACE = 1.2  # a response that took longer for a token than this times the mean counts as this
OFFER_WEIGHT = 1.0 / 2048  # of one prompt in the running mean of what they ask for
CLASSES_AN_OCTAVE = 4  # of response lengths
CLASSES = 24 * CLASSES_AN_OCTAVE
RARE_RESPONSES = 1e-4  # of a group
_LEARNT = ("step_s", "tail_s", "pace_s", "slowest_s", "_publishes")


class LengthMix:
    """What the group of a drawn prompt is predicted to ask for, by length of its responses: running means."""

    def __init__(self) -> None:
        self._means = np.zeros((3, CLASSES))
        self.responses, self.tokens, self.work = self._means  # views; ``work``: of cost.context_work
        self._prompts = 0

    def add(self, lengths: Sequence[float], prompt_tokens: int) -> None:
        tokens = np.maximum(1.0, lengths)
        at = _class_of(tokens)
        self._prompts += 1
        weight = max(1.0 / self._prompts, OFFER_WEIGHT)
        asked = np.empty_like(self._means)
        for place, of_each in enumerate((None, tokens, context_work(tokens, prompt_tokens))):
            asked[place] = np.bincount(at, of_each, CLASSES)
        self._means += weight * (asked - self._means)

    def learnt(self) -> dict[str, Any]:
        """What outlives a crash, as plain values: of the classes that have responses."""
        at = np.flatnonzero(self.responses)
        return {"prompts": self._prompts, "at": at.tolist(), "means": self._means[:, at].tolist()}

    def learn_again(self, values: Mapping[str, Any]) -> None:
        """Restores the values of ``learnt``."""
        self._prompts = values["prompts"]
        self._means[:, values["at"]] = values["means"]

    def classes(self) -> Column:
        """The classes that have responses, but for the rarest, in order of length."""
        return np.flatnonzero(self.responses > RARE_RESPONSES)

    def context_tokens(self) -> float:
        """Mean context of a running request."""
        return float(self.work.sum() / self.tokens.sum())


def _class_of(tokens: Column | float) -> NDArray[np.int64]:
    return np.minimum(CLASSES - 1, (CLASSES_AN_OCTAVE * np.log2(tokens)).astype(np.int64))


class Rates:
    """Running means of the time between publishes and of the seconds a response takes a token; what prompts ask for."""

    def __init__(self) -> None:
        self.published_s = 0.0  # when the newest version was published
        self.took_s: deque[float] = deque(maxlen=LAST_STEPS)  # between the last publishes
        self.step_s = 0.0  # mean time between publishes; 0: not known yet
        self.filled_s = 0.0  # when the last step that is full became so
        self.tail_s = 0.0  # mean time from there to the publish; 0: not known yet
        self.pace_s = 0.0  # seconds a token; 0: not known yet
        self.slowest_s = 0.0  # the same where workers are at their fullest: the most of late, as of a publish
        self.mix = LengthMix()  # of the prompts drawn
        self._publishes = 0

    def published(self, now_s: float) -> float | None:
        """A version was published. Returns the time since the one before; None for the first step, which holds the
        start of everything and is not counted."""
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
        """The last group of a step was delivered."""
        self.filled_s = now_s

    def generated(self, tokens: int, took_s: float) -> None:
        """So many tokens of one response were generated in one stay on a worker."""
        if tokens <= 0 or took_s <= 0.0:
            return
        weight = min(1.0, tokens / PACE_TOKENS) if self.pace_s else 1.0
        pace_s = took_s / tokens
        if self.pace_s:  # one that stood still says little of the others
            pace_s = min(pace_s, ODD_PACE * self.pace_s)
        self.pace_s += weight * (pace_s - self.pace_s)

    def learnt(self, now_s: float) -> dict[str, Any]:
        """The estimates as plain values; times as ages."""
        values = {name: getattr(self, name) for name in _LEARNT}
        ago_s = [now_s - self.published_s, now_s - self.filled_s]
        return values | {"ago_s": ago_s, "took_s": list(self.took_s), "mix": self.mix.learnt()}

    def learn_again(self, values: Mapping[str, Any], now_s: float) -> None:
        """Restores the values of ``learnt``."""
        for name in _LEARNT:
            setattr(self, name, values[name])
        self.published_s, self.filled_s = (now_s - ago_s for ago_s in values["ago_s"])
        self.took_s.extend(values["took_s"])
        self.mix.learn_again(values["mix"])

    @property
    def group_work(self) -> float:
        """Mean over drawn prompts of what their groups cost of KV, in context-tokens."""
        return float(self.mix.work.sum())

    def kv_step_s(self, groups: int, kv_tokens: float) -> float:
        """How long a step of so many groups takes where KV is always full: context-tokens over KV, times the pace.

        0 while it is not known.
        """
        return groups * self.group_work / kv_tokens * self.pace_s if kv_tokens else 0.0

    def full_step_s(self, groups: int, slots: int, kv_tokens: float) -> float:
        """How long such a step takes where KV or slots are always in use, whichever run out first; 0: not known."""
        slots_s = groups * float(self.mix.tokens.sum()) / slots * self.pace_s if slots else 0.0
        slower = self.slowest_s / self.pace_s if self.pace_s else 1.0
        return slower * max(slots_s, self.kv_step_s(groups, kv_tokens))
