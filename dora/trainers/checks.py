"""Checks of a trainer's inputs and results, shared by all trainers.

An error names the fault in one line, before anything is committed; the step's groups are then delivered again.
"""

import math
from typing import Any

import numpy as np

from dora.data.trajectory import TrajectoryGroup
from dora.errors import Conflict, InvalidValue


def check_group(group: TrajectoryGroup, vocab_size: int, reference_version: int | None = None) -> None:
    """Raises InvalidValue for a response that cannot be trained on, naming it.

    A token in the loss mask must have a finite recorded logprob and be in the trainer's vocabulary. Raises Conflict if
    the KL term uses another version than ``reference_version``, if given. ``vocab_size`` 0 is unknown.
    """
    for each in group.trajectories:
        name = f"trajectory {each.trajectory_id}"
        logprobs = each.logprobs[each.loss_mask != 0]
        if not np.isfinite(logprobs).all():
            allowed = "finite for every token in the loss mask, to compute the importance ratio"
            raise InvalidValue(f"{name}: logprobs", float(logprobs[~np.isfinite(logprobs)][0]), allowed)
        for kind in ("prompt_token_ids", "response_token_ids"):
            token_ids = getattr(each, kind)
            if vocab_size and len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab_size:
                outside = next(int(token) for token in token_ids if not 0 <= token < vocab_size)
                allowed = f"0 to {vocab_size - 1}, the trainer's vocabulary: the service has another model"
                raise InvalidValue(f"{name}: {kind}", outside, allowed)
        if reference_version is not None and each.reference_version != reference_version:
            why = "is not the version of the trainer's KL term"
            raise Conflict(f"{name}: reference_version", each.reference_version, str(reference_version), why)


def check_step(loss: float, grad_norm: float) -> None:
    """Raises InvalidValue if the loss or the gradient of a step is not finite, before the optimiser uses it."""
    for name, value in (("loss", loss), ("grad_norm", grad_norm)):
        if not math.isfinite(value):
            raise InvalidValue(name, value, "finite; the optimiser took no step, and the step is not committed")


def vocab_size_of(config: Any) -> int:
    """Returns the number of tokens that a model with this transformers ``config`` has logits for, or 0 if unknown."""
    return int(getattr(config, "vocab_size", 0) or getattr(getattr(config, "text_config", None), "vocab_size", 0))
