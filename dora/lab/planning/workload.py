"""The generation workload of one training step: tokens, their contexts, and the longest response."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from dora.core.table import Column
from dora.errors import InvalidValue

SIGMA: Final = 1.2  # of log lengths, if only the mean is known: the fit of the DORA paper's workload
_LOG_MAX: Final = 700.0  # limit of a float's logarithm
_HALVINGS: Final = 50  # to the last bits of a logarithm


@dataclass(frozen=True, slots=True)
class StepWorkload:
    """One step's batch. N tokens and C context-tokens are inputs of the bubble-free bound."""

    responses: int
    # response lengths at standard normal scores, not rounded, maybe over the limit
    tokens_at: Callable[[Column], Column]
    n_tokens: float  # N: tokens to generate
    c_tokens: float  # C: the context tokens attended to, summed over all generated tokens
    cap_tokens: int  # longest response
    prompt_tokens: float  # mean


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Response lengths: lognormal, limited to ``cap_tokens``."""

    mu: float
    sigma: float
    cap_tokens: int

    def __post_init__(self) -> None:
        for field, value, valid, allowed in (
            ("lengths.mu", self.mu, math.isfinite(self.mu), "a finite number"),
            ("lengths.sigma", self.sigma, 0.0 < self.sigma < math.inf, "a finite number above 0"),
            ("lengths.cap_tokens", self.cap_tokens, self.cap_tokens >= 1, "1 or above"),
        ):
            if not valid:
                raise InvalidValue(field, value, allowed)
        if 2.0 * self.mu + 2.0 * self.sigma**2 > _LOG_MAX:
            allowed = f"such that 2 mu + 2 sigma^2, the log of the second moment, is at most {_LOG_MAX:g}"
            raise InvalidValue("lengths.mu", self.mu, f"{allowed}; sigma is {self.sigma:g}")

    def tokens_at(self, scores: Column) -> Column:
        """Returns lengths at these standard normal scores, not limited."""
        tokens: Column = np.exp(np.minimum(self.mu + self.sigma * scores, _LOG_MAX))
        return tokens

    def moment(self, order: int) -> float:
        """Returns E[length ** order]."""
        mu, sigma, log_cap = self.mu, self.sigma, math.log(self.cap_tokens)
        whole = math.exp(order * mu + (order * sigma) ** 2 / 2) * _normal((log_cap - mu - order * sigma**2) / sigma)
        return whole + self.cap_tokens**order * _normal((mu - log_cap) / sigma)


def lognormal_of_mean(mean_tokens: float, cap_tokens: int, sigma: float = SIGMA) -> Lognormal:
    """The lognormal of that spread whose mean, limited to ``cap_tokens``, is ``mean_tokens``."""
    if cap_tokens < 2:
        raise InvalidValue("cap_tokens", cap_tokens, "2 or above, as the mean lies between 1 and it")
    if not 1.0 <= mean_tokens < cap_tokens:
        raise InvalidValue("mean_tokens", mean_tokens, f"at least 1 and below the longest response, {cap_tokens}")
    low, high = math.log(mean_tokens) - sigma**2, math.log(cap_tokens) + 10 * sigma
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if Lognormal(middle, sigma, cap_tokens).moment(1) < mean_tokens:
            low = middle
        else:
            high = middle
    return Lognormal((low + high) / 2, sigma, cap_tokens)


def step_workload(lengths: Lognormal, groups: int, group_size: int, prompt_tokens: float) -> StepWorkload:
    """The expected batch of ``groups`` prompts with ``group_size`` responses each."""
    for field, value, valid in (
        ("groups", groups, groups >= 1),
        ("group_size", group_size, group_size >= 1),
        ("prompt_tokens", prompt_tokens, 0.0 <= prompt_tokens < math.inf),
    ):
        if not valid:
            raise InvalidValue(
                field, value, "1 or above" if field != "prompt_tokens" else "a finite number of 0 or more"
            )
    responses, mean = groups * group_size, lengths.moment(1)
    context = prompt_tokens * mean + (lengths.moment(2) - mean) / 2  # sum of prompt + i over i = 0 .. length - 1
    return StepWorkload(
        responses=responses,
        tokens_at=lengths.tokens_at,
        n_tokens=responses * mean,
        c_tokens=responses * context,
        cap_tokens=lengths.cap_tokens,
        prompt_tokens=prompt_tokens,
    )


def _normal(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2
