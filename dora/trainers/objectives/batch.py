"""The inputs and outputs of an objective: the tokens of a micro-batch, without padding.

They come from the run record (:class:`dora.data.trajectory.Trajectory`) and the forward passes of the trainer's model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from dora.data.trajectory import Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True)
class Row:
    trajectory: Trajectory
    advantage: float

    @property
    def length_tokens(self) -> int:
        return len(self.trajectory.prompt_token_ids) + self.trajectory.length_tokens


def without_routing(row: Row) -> Row:
    """Removes routed experts for a trainer without router replay, so that they are not sent to other ranks."""
    if row.trajectory.routed_experts is None:
        return row
    return Row(replace(row.trajectory, routed_experts=None), row.advantage)


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The concatenated response tokens of some rows: n tokens of r rows.

    Logprobs are natural logarithms of the raw model's probabilities. Only ``logprobs`` carries a gradient.
    """

    logprobs: torch.Tensor  # (n,): of the trained policy
    behaviour: torch.Tensor  # (n,): of the sampling policy, as the engine computed them
    mask: torch.Tensor  # (n,), bool: sampled by the policy; where False, other values are undefined, even NaN
    advantages: torch.Tensor  # (r,)
    lengths: torch.Tensor  # (r,), int64: response tokens of each row; their sum is n
    proximal: torch.Tensor | None = None  # (n,): of the policy at the step's start; None: it is the trained one
    reference: torch.Tensor | None = None  # (n,): of the reference version; None: there is no KL term

    @classmethod
    def of(cls, rows: Sequence[Row], logprobs: torch.Tensor, **others: Any) -> "TokenBatch":
        """Joins ``logprobs`` (n,) with the recorded values of ``rows``, on its device and in its dtype."""
        members = [row.trajectory for row in rows]
        behaviour = torch.from_numpy(np.concatenate([each.logprobs for each in members]))
        mask = torch.from_numpy(np.concatenate([each.loss_mask for each in members]))
        return cls(
            logprobs,
            behaviour.to(logprobs),
            mask.to(logprobs.device, torch.bool),
            torch.tensor([row.advantage for row in rows]).to(logprobs),
            torch.tensor([each.length_tokens for each in members], device=logprobs.device),
            **others,
        )

    @property
    def rows(self) -> torch.Tensor:
        """(n,): the row of each token."""
        return torch.repeat_interleave(torch.arange(len(self.lengths), device=self.lengths.device), self.lengths)

    @property
    def counts(self) -> torch.Tensor:
        """(r,): masked-in tokens of each row, at least 1, so that it can be a divisor."""
        return self.row_sums(self.mask.to(self.logprobs.dtype)).clamp(min=1.0)

    def row_sums(self, values: torch.Tensor) -> torch.Tensor:
        """(r,): the sum of ``values`` (n,) over each row."""
        return values.new_zeros(len(self.lengths)).index_add(0, self.rows, values)

    def spread(self, of_rows: torch.Tensor) -> torch.Tensor:
        """(n,): each row's value at each of its tokens."""
        return of_rows[self.rows]


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """The objective's values for each token of a batch; shape (n,). Only ``losses`` carries a gradient."""

    losses: torch.Tensor  # 0 where the mask is 0
    ratios: torch.Tensor  # the clipped importance ratio, to the objective's anchor; 1 where the mask is 0
    clipped: torch.Tensor  # bool: clipping removed the gradient or limited its weight
    weights: torch.Tensor  # of the correction; 1 if there is none


class Objective(Protocol):
    """A loss over whole steps, accumulated group by group. ``dora.trainers.objectives.presets`` has implementations.

    The loss of a step is ``(sum of sums) / (sum of units)`` over its micro-batches, regardless of the cut. Gradients
    are therefore accumulated undivided and divided once, without knowledge of groups that have not arrived.
    """

    @property
    def needs_reference(self) -> bool:
        """Whether ``TokenBatch.reference`` is required."""

    def rows(self, group: TrajectoryGroup) -> list[Row]:
        """A group's rows to train on, with advantages; empty for a group without a learning signal."""

    def terms(self, batch: TokenBatch) -> TokenTerms:
        """The loss of each token, and the values to report."""

    def sum(self, batch: TokenBatch, terms: TokenTerms) -> tuple[torch.Tensor, float]:
        """The batch's part of the step's loss, a scalar with a gradient, and its units, by which the step divides."""
