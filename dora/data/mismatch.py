"""The mismatch: how far the policy that samples, the engine's, is from the trainer's policy of the same version.

The trainer recomputes the logprob of each token that it trains on. With the same weights the rest is due to rounding,
quantisation, and other kernels. A trainer reports it as metrics of its commit, by staleness. At staleness 0 trainer and
engine have the same weights; at a higher one the figures also contain what training has changed since.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final

RATIO_LOW: Final = 0.8
RATIO_HIGH: Final = 1.25
KL: Final = "mismatch_kl"  # names of the metrics, after ``staleness_0/``
OUTSIDE: Final = "ratio_outside"
TOKENS: Final = "tokens_trained"
MOVEMENT: Final = "movement"  # of the policy in a step, nats a token
STALENESS_MAX: Final = 16  # that is looked for


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The mismatch of one version's responses in one step."""

    version: Annotated[int, "version that sampled the tokens"]
    staleness: Annotated[int, "of the tokens; above 0 the figures contain what training has changed since"]
    kl: Annotated[float, "KL divergence of the engines' policy from the trainer's, nats a token"]
    ratio_outside: Annotated[float, f"share of importance ratios outside {RATIO_LOW} to {RATIO_HIGH}"]
    tokens: Annotated[int, "trained tokens"]


def mismatches(step: int, metrics: Mapping[str, float]) -> list[Mismatch]:
    """Returns what the commit of ``step`` tells, the newest version first."""
    found = []
    for staleness in range(min(step, STALENESS_MAX) + 1):
        kl, outside, tokens = (metrics.get(f"staleness_{staleness}/{name}", 0.0) for name in (KL, OUTSIDE, TOKENS))
        is_told = f"staleness_{staleness}/{KL}" in metrics
        if is_told and all(0.0 <= value < math.inf for value in (kl, outside, tokens)):
            found.append(Mismatch(step - staleness, staleness, kl, outside, int(tokens)))
    return found


def least_kl(step: int, metrics: Mapping[str, float], movements: Mapping[int, float]) -> float:
    """Returns a lower bound of the KL divergence that is due to the engines, or -1 if it is not known.

    At staleness 0 it is the divergence itself. Tokens of an older version also show what training has changed since;
    ``movements`` has that of each step. Roots of small divergences add up at most, as distances do.
    """
    found = mismatches(step, metrics)
    if not found:
        return -1.0
    roots = [math.sqrt(max(0.0, movements.get(each, math.inf))) for each in range(found[0].version, step)]
    return max(0.0, math.sqrt(found[0].kl) - sum(roots)) ** 2


def by_version(found: Iterable[Mismatch]) -> list[Mismatch]:
    """Returns one of each version, that of the lowest staleness, the newest version first."""
    least: dict[int, Mismatch] = {}
    for each in found:
        if each.version not in least or each.staleness < least[each.version].staleness:
            least[each.version] = each
    return [least[version] for version in sorted(least, reverse=True)]


def to_json(found: Iterable[Mismatch]) -> tuple[dict[str, Any], ...]:
    return tuple(asdict(each) for each in found)
