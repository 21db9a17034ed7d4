"""Advantages of responses over their group: pure functions of a group's rewards.

Rewards and ``valid`` have shape (group,), float64 and bool; an advantage is float32 of that shape. A response with an
invalid reward has advantage 0, so its tokens have no gradient. All are 0 if fewer than two rewards are valid, or the
valid ones are equal: such a group teaches nothing.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from dora.errors import InvalidValue

STD_MIN: Final = 1e-6  # of a group's rewards; if they differ by less, they are the same reward

Estimator = Literal["normalized", "centred", "leave-one-out"]
_Float32Array = npt.NDArray[np.float32]
_Float64Array = npt.NDArray[np.float64]
_BoolArray = npt.NDArray[np.bool_]


def normalized(rewards: _Float64Array, valid: _BoolArray) -> _Float32Array:
    """A_i = (r_i - mean(r)) / std(r), with the population standard deviation.

    Source: *DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models*, section 4.1.2.
    """
    return _of_valid(rewards, valid, lambda chosen: (chosen - chosen.mean()) / chosen.std())


def centred(rewards: _Float64Array, valid: _BoolArray) -> _Float32Array:
    """A_i = r_i - mean(r).

    Source: *Understanding R1-Zero-Like Training: A Critical Perspective*, section 3 (Dr. GRPO): dividing by the
    deviation gives more weight to prompts that are almost always, or almost never, answered well.
    """
    return _of_valid(rewards, valid, lambda chosen: chosen - chosen.mean())


def leave_one_out(rewards: _Float64Array, valid: _BoolArray) -> _Float32Array:
    """A_i = r_i - mean of the others' rewards = k / (k - 1) (r_i - mean(r)), with k valid rewards.

    A response is no part of its own baseline, so the policy gradient has no bias. Source: Kool and others: *Buy 4
    REINFORCE Samples, Get a Baseline for Free!*, section 2; Ahmadian and others: *Back to Basics: Revisiting REINFORCE
    Style Optimization for Learning from Human Feedback in LLMs* (the RLOO estimator).
    """
    return _of_valid(rewards, valid, lambda chosen: (chosen - chosen.mean()) * len(chosen) / (len(chosen) - 1))


ESTIMATORS: Final[Mapping[Estimator, Callable[[_Float64Array, _BoolArray], _Float32Array]]] = {
    "normalized": normalized,
    "centred": centred,
    "leave-one-out": leave_one_out,
}


def over_sessions(
    estimate: Callable[[_Float64Array, _BoolArray], _Float32Array],
    rewards: _Float64Array,
    valid: _BoolArray,
    sessions: npt.NDArray[np.int64],
) -> _Float32Array:
    """The advantages of branches, which are those of their sessions: a session with many branches counts once.

    ``sessions`` (group,) has the session of each branch. Its reward is the mean of its branches' rewards.
    """
    names, of_branch, branches = np.unique(sessions, return_inverse=True, return_counts=True)
    if len(names) == len(sessions):
        return estimate(rewards, valid)
    known = np.where(valid, rewards, 0.0)
    of_sessions = estimate(np.bincount(of_branch, known) / branches, np.bincount(of_branch, ~valid) == 0)
    found: _Float32Array = of_sessions[of_branch]
    return found


def soft_overlong_punishment(
    lengths: npt.NDArray[np.int64], limits: npt.NDArray[np.int64], buffer: float
) -> _Float64Array:
    """(group,), 0 to -1: what is added to the reward of a response that comes near its length limit.

        R = 0                       where          n <= L - c
            ((L - c) - n) / c       where  L - c < n <= L
            -1                      where  L     < n

    ``lengths`` n and ``limits`` L (``sampling.max_tokens``) are in tokens; ``buffer`` is c / L, above 0 and at most 1.
    Source: *DAPO: An Open-Source LLM Reinforcement Learning System at Scale*, section 3.4, equation 13. Raises
    InvalidValue for another buffer.
    """
    if not 0 < buffer <= 1:
        raise InvalidValue("buffer", buffer, "above 0 and at most 1, a part of the length limit")
    cache = buffer * limits
    return np.clip(((limits - cache) - lengths) / cache, -1.0, 0.0)


def _of_valid(
    rewards: _Float64Array, valid: _BoolArray, estimate: Callable[[_Float64Array], npt.NDArray[Any]]
) -> _Float32Array:
    advantages = np.zeros(len(rewards), np.float32)
    chosen = rewards[valid]
    if len(chosen) >= 2 and chosen.std() > STD_MIN:
        advantages[valid] = estimate(chosen)
    return advantages
