"""The policy-gradient terms: the loss of each token.

In the equations pi is the trained policy, mu its anchor (the behaviour policy, or the proximal one), A_i the advantage
of response i, r_it = pi(y_it) / mu(y_it), and sg() stops the gradient. Each function returns minus the term that the
papers maximise, for each token, before averaging.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import torch

from dora.trainers.objectives.batch import TokenBatch

LOG_RATIO_MAX: Final = 20.0  # exp of more overflows float32 sums; such a ratio is clipped, or obvious in the signals

SurrogateName = Literal["clipped", "clipped-sequence", "clipped-weight", "reinforce"]


@dataclass(frozen=True, slots=True)
class Clip:
    """Limits of a ratio: 1 - low .. 1 + high. A ``low`` of 1 is no lower limit."""

    low: float
    high: float

    def __call__(self, ratio: torch.Tensor) -> torch.Tensor:
        return ratio.clamp(1.0 - self.low, 1.0 + self.high)


@dataclass(frozen=True, slots=True)
class Surrogate:
    """(n,) each: the term with its gradient, the ratio, and where clipping limits the gradient."""

    losses: torch.Tensor
    ratios: torch.Tensor
    clipped: torch.Tensor


def log_ratio(batch: TokenBatch, logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """(n,): log(pi / other) within LOG_RATIO_MAX, 0 outside the mask, whatever the logprobs hold there."""
    return torch.where(batch.mask, logprobs - other, 0.0).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)


def clipped(batch: TokenBatch, anchor: torch.Tensor, clip: Clip) -> Surrogate:
    """min(r_it A_i, clip(r_it, 1 - low, 1 + high) A_i): GRPO, DAPO and PPO.

    Sources: Schulman and others: *Proximal Policy Optimization Algorithms*, section 3, equation 7; *DeepSeekMath*,
    section 4.1.1, equation 3; with low < high, *DAPO*, section 3.1 (clip-higher), equation 10.
    """
    return _pessimistic(batch, log_ratio(batch, batch.logprobs, anchor).exp(), clip)


def clipped_sequence(batch: TokenBatch, anchor: torch.Tensor, clip: Clip) -> Surrogate:
    """min(s_i A_i, clip(s_i, 1 - low, 1 + high) A_i) with s_i = exp(1/|y_i| sum_t log r_it): GSPO.

    Each token of a response has the response's value, so the mean over them is the paper's term of the response, with
    its gradient. Source: *Group Sequence Policy Optimization*, section 4.1, equations 5 and 7.
    """
    of_rows = batch.row_sums(log_ratio(batch, batch.logprobs, anchor)) / batch.counts
    return _pessimistic(batch, batch.spread(of_rows).exp(), clip)


def clipped_weight(batch: TokenBatch, anchor: torch.Tensor, clip: Clip) -> Surrogate:
    """sg(clip(r_it, 1 - low, 1 + high)) A_i log pi(y_it): CISPO. Every token keeps its gradient, with a limited weight.

    Source: *MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention*, section 3.1, equations 4, 5.
    """
    ratios = log_ratio(batch, batch.logprobs, anchor).exp().detach()
    weights = clip(ratios)
    losses = -weights * batch.spread(batch.advantages) * torch.where(batch.mask, batch.logprobs, 0.0)
    return Surrogate(losses, ratios, batch.mask & (weights != ratios))


def reinforce(batch: TokenBatch, anchor: torch.Tensor, clip: Clip) -> Surrogate:
    """A_i log pi(y_it): REINFORCE; with leave-one-out advantages A_i, RLOO. Nothing is clipped; ``clip`` is not used.

    Sources: Williams: *Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning*;
    Ahmadian and others: *Back to Basics: Revisiting REINFORCE Style Optimization*, which finds clipping unnecessary.
    """
    losses = -batch.spread(batch.advantages) * torch.where(batch.mask, batch.logprobs, 0.0)
    ratios = log_ratio(batch, batch.logprobs, anchor).exp().detach()
    return Surrogate(losses, ratios, torch.zeros_like(batch.mask))


SURROGATES: Final[Mapping[SurrogateName, Callable[[TokenBatch, torch.Tensor, Clip], Surrogate]]] = {
    "clipped": clipped,
    "clipped-sequence": clipped_sequence,
    "clipped-weight": clipped_weight,
    "reinforce": reinforce,
}


def _pessimistic(batch: TokenBatch, ratios: torch.Tensor, clip: Clip) -> Surrogate:
    advantages = batch.spread(batch.advantages)
    free, bounded = ratios * advantages, clip(ratios) * advantages
    losses = -torch.where(batch.mask, torch.minimum(free, bounded), 0.0)
    return Surrogate(losses, ratios.detach(), batch.mask & (bounded < free).detach())
