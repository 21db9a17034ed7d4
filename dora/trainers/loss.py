"""DAPO's token-level, asymmetrically clipped loss.

Source: DAPO, clip-higher and one mean over all tokens of a batch rather than a mean of per-response means, so that a
token weighs the same in a long response as in a short one.
"""

from dataclasses import dataclass

import torch

_LOG_RATIO_MAX = 20.0  # exp of more overflows float32 sums; such a ratio is clipped, or loud in the metrics, anyway


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Sums over the masked tokens of a micro-batch. ``loss_sum`` carries the gradient, the rest are numbers."""

    loss_sum: torch.Tensor
    tokens: int
    tokens_clipped: int  # where clipping took the gradient away
    ratio_max: float
    logprob_sum: float  # of the present policy
    logprob_diff_sum: float  # |present - behaviour|


def clipped_token_loss(
    logprobs: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    eps_low: float,
    eps_high: float,
) -> TokenLoss:
    """-sum(min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)) over the tokens with mask 1.

    ``logprobs`` and ``behaviour`` have shape (rows, tokens), ``advantages`` (rows,), ``mask`` (rows, tokens), bool.
    ``r = exp(logprobs - behaviour)``. The sum is not divided: the caller divides by the tokens of the whole step.
    """
    log_ratio = torch.where(mask, logprobs - behaviour, 0.0)  # padding may hold anything, NaN included
    ratio = log_ratio.clamp(-_LOG_RATIO_MAX, _LOG_RATIO_MAX).exp()
    weight = advantages[:, None]
    free = ratio * weight
    clipped = ratio.clamp(1.0 - eps_low, 1.0 + eps_high) * weight
    loss_sum = -torch.where(mask, torch.minimum(free, clipped), 0.0).sum()
    with torch.no_grad():
        return TokenLoss(
            loss_sum=loss_sum,
            tokens=int(mask.sum()),
            tokens_clipped=int((mask & (clipped < free)).sum()),
            ratio_max=float(torch.where(mask, ratio, 0.0).max()),
            logprob_sum=float(torch.where(mask, logprobs, 0.0).sum()),
            logprob_diff_sum=float(log_ratio.abs().sum()),
        )


def kl_sum(logprobs: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum over masked tokens of exp(d) - d - 1 with d = reference - logprobs: never negative, unbiased for the KL."""
    difference = torch.where(mask, reference - logprobs, 0.0).clamp(max=_LOG_RATIO_MAX)
    return (difference.exp() - difference - 1.0).sum()
