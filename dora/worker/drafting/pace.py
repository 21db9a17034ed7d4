"""Decides how sure a drafted token must be, from the engine's measured cost of a step.

A step costs a constant, an amount for each token that it is fed, and an amount for verifying at all. A drafted token
pays if its probability times the time of a token exceeds its cost. A full batch spends its time on tokens, so no draft
pays there; a small one spends it on the constant.
"""

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from dora.data.limits import DRAFT_TOKENS_MAX

DECAY: Final = 0.98  # of what earlier steps count, from step to step
SOLVE_STEPS: Final = 16
PRIOR_STEPS: Final = 2.0  # that the prior counts as
PRIOR_SHARE: Final = 0.03  # of a step's constant, for one token, before anything is known
LEAST_MIN: Final = 0.05
OUTLIER: Final = 4.0  # times the usual step: no measure of this engine's cost
SMALL: Final = 16  # requests: in a batch up to this, a lookup costs little, and each request rests by itself
TRIAL_STEPS, ROUND_STEPS = 4, 256  # of a larger batch: tried with and without lookups, and from trial to trial


class Pace:
    """The cost of steps that compute no prompt, in seconds, and the worth of a drafted token."""

    def __init__(self) -> None:
        self._moments = np.zeros((3, 3))
        self._sums = np.zeros(3)
        self._steps = 0
        self._mean_s = 0.0
        self.base_s = self.token_s = self.verify_s = 0.0

    def observe(self, step_s: float, fed: int, *, drafted: bool) -> None:
        """Enters a step that was fed so many tokens."""
        if self._steps and step_s > OUTLIER * max(self._mean_s, self.step_s(fed, drafted=drafted)):
            return
        self._mean_s = step_s if not self._steps else 0.95 * self._mean_s + 0.05 * step_s
        features = np.array([1.0, fed, float(drafted)])
        self._moments = DECAY * self._moments + np.outer(features, features)
        self._sums = DECAY * self._sums + features * step_s
        self._steps += 1
        if self._steps % SOLVE_STEPS == 1:
            self._solve(fed)

    def step_s(self, fed: int, *, drafted: bool) -> float:
        return self.base_s + self.token_s * fed + self.verify_s * drafted

    def least_share(self, requests: int, tokens: float) -> float:
        """Returns the least probability at which a drafted token pays, beside so many requests that yield ``tokens``
        a step; above 1 none does.
        """
        step_s = self.step_s(requests, drafted=False)
        return max(LEAST_MIN, self.token_s * tokens / step_s) if step_s > 0 else LEAST_MIN

    def pays(self, requests: int, drafted: int, expected: float) -> bool:
        """Returns whether a step with so many drafted tokens, of which ``expected`` are accepted, yields more."""
        if not self._steps:
            return True
        plain_s = self.step_s(requests, drafted=False)
        return (requests + expected) * plain_s > requests * self.step_s(requests + drafted, drafted=True)

    def draft_tokens(self, requests: int, drafting: int, acceptance: float, draft_s: float) -> int:
        """Returns how many tokens a model drafts best for ``drafting`` of the requests, if each is accepted with
        ``acceptance`` after those before it, and takes the model ``draft_s``.
        """
        best, count, expected = requests / self.step_s(requests, drafted=False) if self._steps else 0.0, 0, 0.0
        for tokens in range(1, DRAFT_TOKENS_MAX + 1):
            expected += drafting * acceptance**tokens
            step_s = self.step_s(requests + drafting * tokens, drafted=True) + tokens * draft_s
            if self._steps and (requests + expected) / step_s > best:
                best, count = (requests + expected) / step_s, tokens
        return count

    def _solve(self, fed: int) -> None:
        """Fits the cost, drawn to a prior where steps were too alike to tell."""
        base_s = self._mean_s / (1 + PRIOR_SHARE * fed)
        prior = np.array([base_s, PRIOR_SHARE * base_s, 0.05 * base_s])
        weights = PRIOR_STEPS * np.diag([1.0, 16.0, 1.0])
        base, token, verify = np.linalg.solve(self._moments + weights, self._sums + weights @ prior)
        self.base_s, self.token_s, self.verify_s = max(0.0, base), max(0.0, token), max(0.0, verify)


@dataclass(slots=True)
class _Timed:
    """Sums without lookups and with them, in which old steps fade."""

    steps: int = 0
    took_s: list[float] = field(default_factory=lambda: [0.0, 0.0])
    tokens: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def token_s(self, *, looked: bool) -> float:
        return self.took_s[looked] / self.tokens[looked] if self.tokens[looked] else 0.0


class Worth:
    """Tells whether large batches look for drafts, by the measured time of a token with lookups and without. Each size
    (within a factor of two) tries both in turn, and stays with the faster one until the next trial.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, _Timed] = {}

    def looks(self, requests: int) -> bool:
        """Returns whether the next step of so many requests looks for drafts."""
        if requests <= SMALL:
            return True
        timed = self._sizes.setdefault(requests.bit_length(), _Timed())
        place, timed.steps = timed.steps % ROUND_STEPS, timed.steps + 1
        if place < 2 * TRIAL_STEPS:
            return place >= TRIAL_STEPS
        return timed.token_s(looked=True) < timed.token_s(looked=False)

    def stepped(self, requests: int, step_s: float, tokens: int, *, looked: bool) -> None:
        """Enters a step, with the tokens that it yielded."""
        timed = self._sizes.get(requests.bit_length())
        if timed is None or not tokens:
            return
        if usual_s := timed.token_s(looked=looked):
            step_s = min(step_s, OUTLIER * usual_s * tokens)
        timed.took_s[looked] = 0.9 * timed.took_s[looked] + step_s
        timed.tokens[looked] = 0.9 * timed.tokens[looked] + tokens
