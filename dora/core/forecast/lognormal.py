"""Lognormal predictions of response lengths: remaining tokens, the chance to continue, the longest of a group.

A response's length is predicted as lognormal: its natural logarithm has mean ``log_mean`` and standard deviation
``log_sd``. Everything here follows from Mills' ratio R(x) = P(Z > x) / density(x) of the standard normal. Its logarithm
is smooth and nearly straight. A table with linear interpolation therefore serves whole columns at once, and ratios of
far tails never underflow. Columns are processed in blocks that fit the processor's cache.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from dora.core.table import Column
from dora.errors import InvalidValue

# the table's domain in standard deviations, and cells per standard deviation
_LOWEST, _HIGHEST, _CELLS = -12.0, 32.0, 64
_NEVER = -8.0  # a bound further below the mean excludes nothing
_SURELY = 30.0  # a response that exceeds its prediction by more shows that the deviation was too small: it is increased
_SD_MIN, _SD_MAX = 1e-6, 3.9  # _NEVER - _SD_MAX must lie in the table
_BLOCK = 8192  # rows: a kernel's dozen temporaries stay in the cache
_LOG_ROOT_2PI = 0.5 * math.log(2.0 * math.pi)
_NORMAL = NormalDist()


def _log_mills_exact(x: float) -> float:
    if x > 25.0:  # erfc nears underflow; the asymptotic series is exact to 1e-8 from here
        return math.log((1.0 - 1.0 / x**2 + 3.0 / x**4) / x)
    return math.log(0.5 * math.erfc(x / math.sqrt(2.0))) + 0.5 * x * x + _LOG_ROOT_2PI


_LOG_MILLS = np.array(
    [_log_mills_exact(_LOWEST + cell / _CELLS) for cell in range(int((_HIGHEST - _LOWEST) * _CELLS) + 1)]
)
_SLOPES = np.diff(_LOG_MILLS, append=_LOG_MILLS[-1])


@dataclass(frozen=True, slots=True)
class Estimate:
    """The predicted length of one response of a group.

    ``group_share`` is the share of the variance ``log_sd ** 2`` that the whole group has in common (uncertainty about
    the prompt). The rest is each sibling's own. ``known_tokens`` is empty, or has the exact length of every sibling,
    which then replaces the distribution.
    """

    log_mean: float
    log_sd: float
    group_share: float
    known_tokens: tuple[int, ...] = ()

    def of_siblings(self, count: int) -> tuple[list[float], float]:
        """``log_mean`` of each of ``count`` siblings, and ``log_sd`` of all. For known lengths, exact means and 0."""
        if self.known_tokens:
            return [math.log(tokens) for tokens in self.known_tokens], 0.0
        return [self.log_mean] * count, self.log_sd


# ------------------------------------------------------------------------------------------------------------- columns


def log_mills(x: Column) -> Column:
    """Natural logarithm of Mills' ratio for x in -12 .. 32, to 4e-5."""
    scaled = (x - _LOWEST) * _CELLS
    cell = scaled.astype(np.intp)
    scaled -= cell
    scaled *= _SLOPES.take(cell, mode="clip")  # numpy's other modes are slower
    scaled += _LOG_MILLS.take(cell, mode="clip")
    return scaled


def remaining_tokens(
    log_mean: Column | float, log_sd: Column | float, tokens: Column | float, max_tokens: Column | float
) -> Column:
    """Expected remaining tokens of running responses that have ``tokens``, each limited to ``max_tokens``.

    E[min(X, max_tokens) | X > tokens] - tokens, at least 1 while a response runs and 0 at its limit. All arguments
    broadcast to one shape (rows,).
    """

    def kernel(mean: Column, sd: Column, done: Column, limit: Column) -> Column:
        sd, lower = _standardised(mean, sd, done)
        upper = np.clip((np.log(np.maximum(limit, 1.0)) - mean) / sd, lower, _SURELY)
        log_lower, log_upper = log_mills(lower), log_mills(upper)
        uncut = np.exp(mean + sd * lower + log_mills(lower - sd) - log_lower)
        # The part beyond the limit: the chance to reach it, times the mean excess over it (in units of the limit).
        reached = log_upper - log_lower + 0.5 * (lower * lower - upper * upper)
        cut = np.exp(mean + sd * upper + reached) * np.expm1(log_mills(upper - sd) - log_upper)
        return _within_limit(uncut - cut, done, limit)

    columns = (np.atleast_1d(column) for column in (log_mean, log_sd, tokens, max_tokens))
    return _blockwise(kernel, *np.broadcast_arrays(*columns))


def survival_chance(
    log_mean: Column, log_sd: Column, tokens: Column, max_tokens: Column, ahead_tokens: Column
) -> Column:
    """P[X > tokens + ahead | X > tokens]: the chance that a response runs ``ahead`` more. Shape (rows, ahead)."""

    def log_tail(score: Column) -> Column:
        return log_mills(score) - 0.5 * score * score

    def kernel(mean: Column, sd: Column, done: Column, limit: Column) -> Column:
        sd, lower = _standardised(mean, sd, done)
        end = done + ahead_tokens[:, None]  # rows last: numpy is fast along the last axis
        upper = np.clip((np.log(np.maximum(end, 1.0)) - mean) / sd, lower, _SURELY)
        chance: Column = np.exp(log_tail(upper) - log_tail(lower)) * (end < limit)
        return chance

    return _blockwise(kernel, log_mean, log_sd, tokens, max_tokens).T


def running_chance(
    remaining_tokens: Column,
    log_mean: Column,
    log_sd: Column,
    tokens: Column,
    max_tokens: Column,
    ahead_tokens: Column,
) -> Column:
    """The chance that a response runs for this many more tokens, 0 or 1 if lengths are known. Shape (rows, ahead)."""
    if log_sd.any():
        return survival_chance(log_mean, log_sd, tokens, max_tokens, ahead_tokens)
    known: Column = remaining_tokens[:, None] > ahead_tokens
    return known


def expected_remaining(
    expected_tokens: Column, log_mean: Column, log_sd: Column, tokens: Column, max_tokens: Column
) -> Column:
    """Remaining tokens; the rest of ``expected_tokens`` if all lengths are known. Shape (rows,)."""
    if log_sd.any():
        return remaining_tokens(log_mean, log_sd, tokens, max_tokens)
    known: Column = np.maximum(expected_tokens - tokens, 0).astype(np.float64)
    return known


def _blockwise(kernel: Callable[[Column, Column, Column, Column], Column], *columns: Column) -> Column:
    """The kernel's result, computed in blocks, with rows along its last axis."""
    rows = len(columns[0])
    if rows <= _BLOCK:
        return kernel(*columns)
    blocks = (slice(first, first + _BLOCK) for first in range(0, rows, _BLOCK))
    return np.concatenate([kernel(*(column[block] for column in columns)) for block in blocks], axis=-1)


def _standardised(mean: Column, sd: Column, tokens: Column) -> tuple[Column, Column]:
    """The deviation to use, and ``tokens`` as standard scores, both limited to the table's domain."""
    log_tokens = np.log(np.maximum(tokens, 1.0))
    sd = np.clip(np.maximum(sd, (log_tokens - mean) / _SURELY), _SD_MIN, _SD_MAX)
    return sd, np.clip((log_tokens - mean) / sd, _NEVER, _SURELY)


def _within_limit(end: Column, tokens: Column, max_tokens: Column) -> Column:
    return np.maximum(np.minimum(np.maximum(end - tokens, 1.0), max_tokens - tokens), 0.0)


# -------------------------------------------------------------------------------------------------------------- groups


def longest_quantile(estimate: Estimate, group_size: int, q: float, max_tokens: float = math.inf) -> float:
    """``q``-quantile (0 < q < 1) of the longest of ``group_size`` responses, in tokens, at most ``max_tokens``.

    Exact if the lengths are known, or if all or none of the variance is common. Otherwise the deviations of the two
    parts from the median are added in quadrature (within 3% of the exact value for q from 0.2 to 0.95).
    """
    if estimate.known_tokens:
        return min(float(max(estimate.known_tokens)), max_tokens)
    median, own, common = _longest_scores(group_size, q)
    variance = estimate.log_sd * estimate.log_sd
    own_sd = math.sqrt((1.0 - estimate.group_share) * variance)
    spread = math.sqrt((own_sd * own) ** 2 + estimate.group_share * variance * common * common)
    log_tokens = estimate.log_mean + own_sd * median + math.copysign(spread, common)
    return min(math.exp(min(log_tokens, 700.0)), max_tokens)


@lru_cache(maxsize=1024)
def _longest_scores(group_size: int, q: float) -> tuple[float, float, float]:
    """For the largest of ``group_size`` standard normals, the median and the q-quantile's distance; then q's score."""
    if group_size < 1:
        raise InvalidValue("group_size", group_size, "at least 1")
    if not 0.0 < q < 1.0:
        raise InvalidValue("q", q, "above 0 and below 1")
    median = _NORMAL.inv_cdf(0.5 ** (1.0 / group_size))
    return median, _NORMAL.inv_cdf(q ** (1.0 / group_size)) - median, _NORMAL.inv_cdf(q)
