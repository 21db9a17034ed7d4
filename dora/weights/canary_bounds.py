"""By how much the logprobs of loaded weights may differ from the published canary."""

import math
from fractions import Fraction
from typing import Final, NamedTuple

from dora.data.types import Canary, EngineNumerics
from dora.errors import CanaryMismatch, InvalidValue


class CanaryBound(NamedTuple):
    """An engine's bound. ``share`` of a canary's logprobs must differ by ``most`` at most."""

    most: float
    share: Fraction = Fraction(1)


# Bounds for rounding, measured on CPUs. Against transformers over the canary's 47 tokens the difference is 5e-5 in fp32
# and 0.23 in bfloat16; raw experts read as packed ones, or the head of an unrelated version, differ by 2 to 4. In
# bfloat16 a router may validly choose another expert for a token or two, whose logprobs then differ freely (up to
# 0.72), while nine in ten stay within 0.03. A head that is one small training step behind may hide below this bound, so
# the patches verify themselves at every start.
CANARY_BOUNDS: Final = {"float32": CanaryBound(1e-3), "bfloat16": CanaryBound(0.25, Fraction(9, 10))}
# The trainer's canary is computed from unquantised weights, so the bound allows for quantisation, by its kind. With the
# same arithmetic in transformers (dora/models/quantisation.py) nine in ten of SmolLM2-135M's differ by 0.71 (int8) and
# 0.88 (fp8) at most, and of random models by 0.07 and 0.26. The canary's tokens are random, so most are improbable.
QUANTISED_BOUNDS: Final = {"int8": CanaryBound(1.0, Fraction(9, 10)), "fp8": CanaryBound(1.25, Fraction(9, 10))}
KV_BOUND: Final = CanaryBound(0.5, Fraction(9, 10))  # of KV in a lower precision than the weights' dtype


def bound_of(numerics: EngineNumerics) -> CanaryBound:
    """Returns the bound of an engine, on GPUs too. Raises InvalidValue for a dtype or quantisation without one."""
    if numerics.dtype not in CANARY_BOUNDS:
        raise InvalidValue("dtype", numerics.dtype, " or ".join(CANARY_BOUNDS))
    if numerics.quantisation:
        if numerics.quantisation not in QUANTISED_BOUNDS:
            allowed = ", ".join((*QUANTISED_BOUNDS, "or empty: none"))
            raise InvalidValue("quantisation", numerics.quantisation, allowed)
        return QUANTISED_BOUNDS[numerics.quantisation]
    return KV_BOUND if numerics.kv_dtype else CANARY_BOUNDS[numerics.dtype]


def check_reproduced(version: int, found: Canary, expected: Canary, bound: CanaryBound) -> None:
    """Raises CanaryMismatch if loaded weights give other logprobs than were published with them."""
    apart = sorted(_apart(ours, theirs) for ours, theirs in zip(found.logprobs, expected.logprobs, strict=True))
    difference = apart[math.ceil(bound.share * len(apart)) - 1]
    if not difference <= bound.most:
        of = "logprobs" if bound.share == 1 else f"more than {1 - bound.share} of the logprobs"
        raise CanaryMismatch(
            f"version {version}: {of} differ from the canary by {difference:.3g}, allowed is {bound.most:g}", difference
        )


def _apart(ours: float, theirs: float) -> float:
    """Returns the difference of two logprobs; infinite if one is NaN, which would not sort."""
    difference = abs(ours - theirs)
    return math.inf if math.isnan(difference) else difference
