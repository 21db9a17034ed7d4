"""Two terms beside the surrogate: weights for samples of another policy, and a distance to the reference version."""

import math
from typing import Literal

import torch

from dora.trainers.objectives.batch import TokenBatch
from dora.trainers.objectives.surrogates import LOG_RATIO_MAX, log_ratio

CorrectionName = Literal["none", "full", "truncate", "mask"]
Level = Literal["token", "sequence", "geometric"]


def correction_weights(
    batch: TokenBatch, proximal: torch.Tensor, name: CorrectionName, level: Level, low: float, high: float
) -> torch.Tensor:
    """(n,), without gradient: the weight, for the proximal policy, of a token sampled by the behaviour policy mu.

    The ratio w is, by ``level``: of the token, w_it = pi_prox(y_it) / mu(y_it); of the sequence, w_i = prod_t w_it; or
    their geometric mean, w_i = (prod_t w_it)^(1/|y_i|), one value at every token of the response. Then by ``name``:

        none       1
        full       w                        decoupled PPO
        truncate   min(w, high)             truncated importance sampling (TIS)
        mask       w if low <= w <= high,   masked importance sampling (MIS)
                   else 0

    mu's logprobs are the rollout engine's own. So w includes the gap between engine and trainer, which compute the same
    weights differently, and the change of the weights since the behaviour version.

    A masked token stays in the step's mean with weight 0, as in the estimator's expectation over mu: the weight of
    other tokens does not increase.

    Sources: full: Hilton and others: *Batch size-invariance for policy optimization*, section 3, the decoupled policy
    objective; *AReaL*, section 5.2. truncate: Espeholt and others: *IMPALA*, section 4.1; Yao and others: *Your
    Efficient RL Framework Secretly Brings You Off-Policy RL Training* (2025). mask, and the levels: Liu and others:
    *When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch* (2025).
    """
    if name == "none":
        return torch.ones_like(batch.logprobs)
    log_weights = log_ratio(batch, proximal, batch.behaviour).detach()
    if level != "token":
        of_rows = batch.row_sums(log_weights)
        of_rows = of_rows / batch.counts if level == "geometric" else of_rows.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
        log_weights = batch.spread(of_rows)
    weights = log_weights.exp()
    if name == "truncate":
        return weights.clamp(max=high)
    if name == "mask":
        return torch.where((weights >= low) & (weights <= high), weights, torch.where(weights.isnan(), math.nan, 0.0))
    return weights


def kl_terms(batch: TokenBatch, reference: torch.Tensor) -> torch.Tensor:
    """(n,): exp(d) - d - 1 with d = log pi_ref(y_it) - log pi(y_it), 0 outside the mask.

    It is never negative, and over samples of pi an unbiased estimate of the KL divergence of pi from pi_ref. Source:
    *DeepSeekMath*, section 4.1.1, equation 4; Schulman: *Approximating KL Divergence* (2020), estimator k3.
    """
    difference = torch.where(batch.mask, reference - batch.logprobs, 0.0).clamp(max=LOG_RATIO_MAX)
    return difference.exp() - difference - 1.0
