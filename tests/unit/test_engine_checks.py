"""A load is proven by the canary: how far its logprobs may be off, and how many of them."""

from fractions import Fraction

import pytest

from dora.data.types import Canary
from dora.errors import CanaryMismatch
from dora.weights.canary_bounds import CanaryBound, check_reproduced
from tests.refusals import refused

TOKENS = tuple(range(41))
PUBLISHED = Canary(TOKENS, (-2.0,) * 40)
MOST = CanaryBound(0.25, Fraction(9, 10))


def off_by(*differences: float) -> Canary:
    return Canary(TOKENS, tuple(-2.0 + each for each in (*differences, *(0.0,) * (40 - len(differences)))))


def test_every_logprob_counts_unless_a_share_is_given() -> None:
    check_reproduced(3, off_by(*(0.2,) * 40), PUBLISHED, CanaryBound(0.25))
    with refused(CanaryMismatch, names=("3", "0.72", "0.25")):
        check_reproduced(3, off_by(0.72), PUBLISHED, CanaryBound(0.25))


def test_a_token_in_ten_may_have_gone_to_another_expert() -> None:
    check_reproduced(3, off_by(0.72, -3.0, 0.5, -0.6), PUBLISHED, MOST)
    with refused(CanaryMismatch, names=("1/10", "0.3")):
        check_reproduced(3, off_by(0.72, -3.0, 0.5, -0.6, 0.3), PUBLISHED, MOST)


def test_what_is_no_number_differs_from_everything() -> None:
    with pytest.raises(CanaryMismatch) as failure:
        check_reproduced(3, off_by(float("nan")), PUBLISHED, CanaryBound(0.25))
    assert failure.value.difference == float("inf")
