"""Prompt lengths: spread around a mean, or from a trace that also has response lengths.

A line of a trace is a prompt length with one response length. A simulated prompt has many responses, drawn again in
every epoch, and keeps its difficulty z (workload.py). Its line is the one whose response has the same rank among all
responses of the trace as z has among difficulties. So prompt lengths have the distribution of the file, and so have
response lengths, which are drawn as without prompt lengths. With a group correlation of 1 a response is the line's own.
With a lower one, the two lengths are as much less correlated as siblings are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dora.data.limits import PROMPT_TOKENS_MAX
from dora.lab.sim.traces import FloatColumn, IntColumn, Trace, normal_scores

PROMPT_LOG_SD = 0.5
PROMPT_TOKENS_MIN = 16
SCORE_MAX = 8.0  # beyond it is 1e-15 of the normal distribution
INTEGRAL_SCORES = 262_145  # points of an integral over the normal distribution
SLICES = 2048  # equally likely slices of the difficulties, in an integral over them
OWN_SCORES = 1025  # points of an integral over a response's own score

# Response tokens at standard normal scores, of the same shape.
Tokens = Callable[[FloatColumn], NDArray[np.number[Any]]]


class PromptLengths(Protocol):
    @property
    def longest_tokens(self) -> int:
        """The longest prompt that any seed can draw."""

    def draw(self, difficulty: FloatColumn, scores: FloatColumn, rng: np.random.Generator) -> IntColumn:
        """Prompt tokens for these difficulties, all columns of one shape. ``scores`` are standard normal."""

    def in_context_tokens(self, tokens: Tokens, group_correlation: float) -> float:
        """Mean prompt in the context of a sampled token, so weighted by response length."""


@dataclass(frozen=True, slots=True)
class SpreadPrompts:
    """Lognormal around ``mean_tokens``, from PROMPT_TOKENS_MIN to PROMPT_TOKENS_MAX, independent of the responses."""

    mean_tokens: int

    @property
    def longest_tokens(self) -> int:
        return int(self._at(np.array([SCORE_MAX]))[0])

    def draw(self, difficulty: FloatColumn, scores: FloatColumn, rng: np.random.Generator) -> IntColumn:
        return self._at(scores)

    def in_context_tokens(self, tokens: Tokens, group_correlation: float) -> float:
        scores, weights = normal_grid(INTEGRAL_SCORES)
        return float(weights @ self._at(scores))

    def _at(self, scores: FloatColumn) -> IntColumn:
        tokens = self.mean_tokens * np.exp(PROMPT_LOG_SD * np.minimum(scores, SCORE_MAX) - 0.5 * PROMPT_LOG_SD**2)
        return np.rint(np.clip(tokens, PROMPT_TOKENS_MIN, PROMPT_TOKENS_MAX)).astype(np.int64)


class TracedPrompts:
    """The lines of a trace, equally likely. The module's docstring explains the choice."""

    def __init__(self, trace: Trace) -> None:
        self._inputs, self._outputs = trace.input_tokens, trace.output_tokens
        lines = len(self._outputs)
        self._bounds = normal_scores(np.arange(1, lines) / lines)

    @property
    def longest_tokens(self) -> int:
        return int(self._inputs.max())

    def draw(self, difficulty: FloatColumn, scores: FloatColumn, rng: np.random.Generator) -> IntColumn:
        """Lines with equal response lengths come in random order, as their difficulty is unknown."""
        shuffled = rng.permutation(len(self._outputs))
        lines = shuffled[np.argsort(self._outputs[shuffled], kind="stable")]
        return self._inputs[lines[np.searchsorted(self._bounds, difficulty, side="right")]]

    def in_context_tokens(self, tokens: Tokens, group_correlation: float) -> float:
        centres = normal_scores((np.arange(SLICES) + 0.5) / SLICES)
        own, weights = normal_grid(OWN_SCORES)
        scores = np.sqrt(group_correlation) * centres[:, None] + np.sqrt(1.0 - group_correlation) * own
        responses = tokens(scores) @ weights
        return float(self._means_of_slices() @ responses / responses.sum())

    def _means_of_slices(self) -> FloatColumn:
        order = np.argsort(self._outputs, kind="stable")
        _, alike, counts = np.unique(self._outputs[order], return_inverse=True, return_counts=True)
        # independent of the order of equal responses
        expected = (np.bincount(alike, self._inputs[order]) / counts)[alike]
        lines = len(order)
        sums = np.interp(
            np.arange(SLICES + 1) / SLICES, np.arange(lines + 1) / lines, np.concatenate([[0.0], expected.cumsum()])
        )
        means: FloatColumn = np.diff(sums) * (SLICES / lines)
        return means


@cache
def normal_grid(points: int) -> tuple[FloatColumn, FloatColumn]:
    """Returns evenly spaced scores from -SCORE_MAX to SCORE_MAX, with weights to integrate over the normal density."""
    scores = np.linspace(-SCORE_MAX, SCORE_MAX, points)
    weights = np.exp(-0.5 * scores**2)
    weights /= weights.sum()
    return scores, weights
