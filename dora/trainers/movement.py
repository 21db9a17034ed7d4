"""The movement of the policy in an optimiser step: the KL divergence of its consecutive versions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from dora.trainers.objectives.batch import Row
from dora.trainers.objectives.surrogates import LOG_RATIO_MAX

PROBE_TOKENS: Final = 1024  # response tokens on which a rank measures it: costs one short forward pass a step


def probed(rows: Sequence[Row]) -> tuple[Row, ...]:
    """The leading rows within PROBE_TOKENS, at least one."""
    tokens = count = 0
    for row in rows:
        if count and tokens + row.trajectory.length_tokens > PROBE_TOKENS:
            break
        tokens += row.trajectory.length_tokens
        count += 1
    return tuple(rows[:count])


@dataclass(frozen=True, slots=True)
class Probe:
    """Rows of a micro-batch with their logprobs before the optimiser step, (n,) without gradient."""

    rows: tuple[Row, ...]
    logprobs: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[Row], logprobs: torch.Tensor) -> "Probe":
        """Returns the ``probed`` rows of a micro-batch. ``logprobs`` are of all ``rows``, row after row."""
        leading = probed(rows)
        tokens = sum(row.trajectory.length_tokens for row in leading)
        return cls(leading, logprobs[:tokens].detach())

    def moved(self, logprobs: torch.Tensor) -> tuple[float, int]:
        """Returns the sum over sampled tokens of the divergence in nats, and their number.

        ``logprobs`` (n,) follow the step. With d the difference of a token's logprobs, exp(d) - 1 - d is never
        negative, and over tokens that the policy before the step sampled its mean is KL(before

        after). Source: Schulman: *Approximating KL Divergence* (2020), estimator k3.
        """
        masks = [torch.from_numpy(row.trajectory.loss_mask) for row in self.rows]
        mask = torch.cat(masks).to(logprobs.device, torch.bool)
        difference = (logprobs.detach() - self.logprobs)[mask].double().clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
        return float((difference.exp() - 1.0 - difference).sum()), int(mask.sum())
