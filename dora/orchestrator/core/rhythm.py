"""How fast training and generation go, as seen from the events: what deadlines are worth in seconds and tokens."""

from math import inf

import numpy as np

from dora.orchestrator.core.table import Column

SMOOTHING = 0.3  # weight of the newest step in the running mean of step times
PACE_TOKENS = 200_000.0  # a response's weight in the running pace is its tokens over this
RECENT = 4096  # finished responses that the distribution of lengths is taken from
SURE = 256  # finished responses before it says anything


class Rhythm:
    """Running means of the time between publishes and of the seconds a response takes a token; recent lengths."""

    def __init__(self) -> None:
        self.published_s = 0.0  # when the newest version was published
        self.step_s = 0.0  # mean time between publishes; 0: not known yet
        self.pace_s = 0.0  # seconds a token; 0: not known yet
        self._publishes = 0
        self._finishes = 0
        self._recent = np.zeros(RECENT)

    def published(self, now_s: float) -> None:
        """A version was published. The first step holds the start of everything and is not counted."""
        self._publishes += 1
        took_s, self.published_s = now_s - self.published_s, now_s
        if self._publishes == 2:
            self.step_s = took_s
        elif self._publishes > 2:
            self.step_s += SMOOTHING * (took_s - self.step_s)

    def finished(self, tokens: int) -> None:
        """A response ended after so many tokens."""
        self._recent[self._finishes % RECENT] = tokens
        self._finishes += 1

    def generated(self, tokens: int, took_s: float) -> None:
        """So many tokens of one response were generated in one stay on a worker."""
        if tokens <= 0 or took_s <= 0.0:
            return
        weight = min(1.0, tokens / PACE_TOKENS) if self.pace_s else 1.0
        self.pace_s += weight * (took_s / tokens - self.pace_s)

    def deadline_s(self, steps_ahead: int, now_s: float, haste: float = 1.0) -> float:
        """When the step ``steps_ahead`` after the one now trained is expected to be published; ``inf``: not known.

        ``steps_ahead`` 0 is the step whose version comes next. ``haste`` below 1 aims for shorter steps than of late.
        """
        if not self.step_s:
            return inf
        step_s = haste * self.step_s
        return max(self.published_s + step_s, now_s) + steps_ahead * step_s

    def still_held(self, after_tokens: Column) -> Column:
        """Of the KV that a steady mix of responses holds, the share that is still held after so many more tokens.

        With the lengths L of recent responses: E[max(L^2 - h^2, 0)] / E[L^2]. All ones while too few have finished.
        """
        if self._finishes < SURE:
            return np.ones(len(after_tokens))
        squares = self._recent[: min(self._finishes, RECENT)] ** 2
        excess = np.maximum(squares[:, None] - after_tokens**2, 0.0)
        return excess.mean(axis=0) / max(1e-9, float(squares.mean()))
