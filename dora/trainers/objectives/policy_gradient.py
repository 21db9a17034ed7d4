"""One objective that covers these papers: a surrogate, an anchor, a correction, a KL term and a mean.

loss of a step = mean over its tokens of  w_it * surrogate_it + beta * kl_it
"""

import math
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import numpy as np
import torch

from dora.data.advantages import ESTIMATORS, Estimator, over_sessions, soft_overlong_punishment
from dora.data.trajectory import TrajectoryGroup
from dora.errors import MISSING, Conflict, InvalidValue, one_of
from dora.trainers.objectives.batch import Row, TokenBatch, TokenTerms
from dora.trainers.objectives.correction import CorrectionName, Level, correction_weights, kl_terms
from dora.trainers.objectives.surrogates import SURROGATES, Clip, SurrogateName

Anchor = Literal["behaviour", "proximal"]
Mean = Literal["token", "sequence", "sequence-sum"]
Overlong = Literal["keep", "mask", "punish"]


@dataclass(frozen=True, slots=True)
class PolicyGradient:
    """An objective, given by its settings. ``presets.objective`` makes the papers' objectives by name."""

    surrogate: SurrogateName
    advantage: Estimator = "normalized"
    mean: Mean = "token"
    # The ratio's denominator: the sampling policy, or the policy at the step's start. With one optimiser step per
    # training step the latter is the policy itself, so every ratio is 1 and nothing is clipped.
    anchor: Anchor = "behaviour"
    eps_low: float = 0.2
    eps_high: float = 0.2
    correction: CorrectionName = "none"  # from the behaviour policy to the proximal one, which must be the anchor
    correction_level: Level = "token"
    correction_low: float = 0.0  # a mask's limits; a truncation uses the upper one
    correction_high: float = 2.0
    kl_coefficient: float = 0.0  # beta; 0: no reference policy is needed
    overlong: Overlong = "keep"  # responses that reached their length limit
    overlong_buffer: float = 0.2  # the part of the length limit over which "punish" rises to 1
    overlong_penalty: float = 1.0  # subtracted from the reward at the limit by "punish"

    def __post_init__(self) -> None:
        """Raises InvalidValue for a value that is not allowed, Conflict for two that cannot be combined."""
        for each in fields(self):
            _check_name(each.name, getattr(self, each.name), get_args(each.type))
        _check(self.eps_low, "eps_low", "above 0 and at most 1", 0 < self.eps_low <= 1)
        _check(self.eps_high, "eps_high", "above 0 and finite", 0 < self.eps_high < math.inf)
        _check(self.correction_low, "correction_low", "0 to 1", 0 <= self.correction_low <= 1)
        _check(self.correction_high, "correction_high", "1 or more", self.correction_high >= 1)
        _check(self.kl_coefficient, "kl_coefficient", "0 or more, and finite", 0 <= self.kl_coefficient < math.inf)
        _check(self.overlong_buffer, "overlong_buffer", "above 0 and at most 1", 0 < self.overlong_buffer <= 1)
        _check(self.overlong_penalty, "overlong_penalty", "above 0 and finite", 0 < self.overlong_penalty < math.inf)
        if self.correction != "none" and self.anchor == "behaviour":
            # the ratio to the behaviour policy is a correction already: weights would correct twice
            allowed = "none, unless anchor = 'proximal'"
            raise Conflict("correction", self.correction, allowed, "would correct twice, as anchor = 'behaviour'")

    @property
    def needs_reference(self) -> bool:
        return self.kl_coefficient > 0

    def rows(self, group: TrajectoryGroup) -> list[Row]:
        """Returns the responses with a valid reward, or none for a group without a learning signal.

        Overlong responses (``finish_reason`` "length") keep their reward and are trained on like any other ("keep");
        count in the others' baseline but are not trained on ("mask": *DAPO*, section 3.4, overlong filtering); or lose
        reward as they come near their limit ("punish": the same section, soft overlong punishment).
        """
        rewards, valid = group.rewards, group.rewards_valid
        if self.overlong == "punish":
            limits = np.array([each.sampling.max_tokens for each in group.trajectories], np.int64)
            rewards = rewards + self.overlong_penalty * soft_overlong_punishment(
                group.lengths, limits, self.overlong_buffer
            )
        advantages = over_sessions(ESTIMATORS[self.advantage], rewards, valid, group.sessions)
        if not advantages.any():
            return []
        return [
            Row(trajectory, float(advantage))
            for trajectory, advantage, counts in zip(group.trajectories, advantages, valid, strict=True)
            if counts
            and trajectory.loss_mask.any()
            and not (self.overlong == "mask" and trajectory.finish_reason == "length")
        ]

    def terms(self, batch: TokenBatch) -> TokenTerms:
        """Computes each token's loss. Raises Conflict for a KL term without reference logprobs in the batch."""
        proximal = batch.logprobs.detach() if batch.proximal is None else batch.proximal
        anchor = batch.behaviour if self.anchor == "behaviour" else proximal
        found = SURROGATES[self.surrogate](batch, anchor, Clip(self.eps_low, self.eps_high))
        limits = (self.correction_low, self.correction_high)
        weights = correction_weights(batch, proximal, self.correction, self.correction_level, *limits)
        losses = weights * found.losses
        if self.needs_reference:
            if batch.reference is None:
                allowed = "the reference version's logprobs, as kl_coefficient is above 0"
                raise Conflict("batch.reference", MISSING, allowed)
            losses = losses + self.kl_coefficient * kl_terms(batch, batch.reference)
        return TokenTerms(losses, found.ratios, found.clipped, weights)

    def sum(self, batch: TokenBatch, terms: TokenTerms) -> tuple[torch.Tensor, float]:
        """By ``mean``, of R responses with |y_i| tokens:

            token          1 / sum_i |y_i|  sum_i sum_t l_it      *DAPO*, section 3.3, equation 12
            sequence       1/R  sum_i 1/|y_i| sum_t l_it          *DeepSeekMath*, section 4.1.1, equation 3
            sequence-sum   1/R  sum_i sum_t l_it                  Dr. GRPO, section 3; REINFORCE

        The factor before the first sum is left to the step's end: its inverse is the second value.
        """
        if self.mean == "token":
            return terms.losses.sum(), float(batch.mask.sum())
        responses = float((batch.row_sums(batch.mask.to(terms.losses.dtype)) > 0).sum())
        if self.mean == "sequence-sum":
            return terms.losses.sum(), responses
        return (batch.row_sums(terms.losses) / batch.counts).sum(), responses


def _check(value: float, name: str, allowed: str, holds: bool) -> None:
    if not holds:
        raise InvalidValue(name, value, allowed)


def _check_name(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if allowed and value not in allowed:
        raise InvalidValue(name, value, one_of(value, allowed))
