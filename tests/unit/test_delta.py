"""A delta brings back the very bytes, whatever they are, is small where little has changed, and never large."""

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora.errors import InvalidValue
from dora.weights.delta import decode, encode
from tests.refusals import refused

ELEMENTS = 1 << 16


def moved(dtype: str, rate: float) -> tuple[bytes, bytes]:
    """Weights before and after a step of an optimiser that moves each by ``rate`` at most (as Adam does)."""
    chance = np.random.default_rng(0)
    before = (chance.standard_normal(ELEMENTS) * 0.02).astype(np.float32)
    after = before - np.float32(rate) * chance.uniform(-1, 1, ELEMENTS).astype(np.float32)
    if dtype == "F32":
        return before.tobytes(), after.tobytes()
    return rounded(before), rounded(after)


def rounded(values: np.ndarray) -> bytes:
    """As bfloat16: the upper half, to the nearest."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()


@given(
    st.binary(max_size=600),
    st.sampled_from([1, 2, 4, 8]),
    st.lists(st.tuples(st.integers(0, 599), st.integers(0, 255))),
)
def test_any_change_comes_back_to_the_bit(base: bytes, element_bytes: int, changes: list[tuple[int, int]]) -> None:
    content = bytearray(base)
    for at, value in changes:
        if at < len(content):
            content[at] = value
    encoded = encode(content, base, element_bytes)
    assert decode(encoded, base, len(base)) == content
    assert len(encoded) <= len(content) + 1 or not content


@pytest.mark.parametrize(
    ("dtype", "rate", "most"), [("BF16", 1e-6, 0.06), ("BF16", 1e-5, 0.2), ("F32", 1e-6, 0.6), ("F32", 1e-5, 0.65)]
)
def test_a_step_of_an_optimiser_is_small(dtype: str, rate: float, most: float) -> None:
    before, after = moved(dtype, rate)
    encoded = encode(after, before, 4 if dtype == "F32" else 2)
    assert decode(encoded, before, len(after)) == after
    assert len(encoded) < most * len(after)


def test_what_does_not_pay_is_sent_as_it_is() -> None:
    chance = np.random.default_rng(1)
    base, content = chance.bytes(4096), chance.bytes(4096)
    for other in (base, None, base[:-1]):
        encoded = encode(content, other, 2)
        assert encoded == b"\0" + content
        assert decode(encoded, None, 4096) == content


def test_another_base_gives_other_bytes_or_none() -> None:
    before, after = moved("BF16", 1e-6)
    encoded = encode(after, before, 2)
    assert decode(encoded, bytes(len(before)), len(before)) != after
    for base in (None, before[:-2]):
        with refused(InvalidValue, field="delta: base"):
            decode(encoded, base, len(after))


def test_bytes_that_are_no_delta_are_refused() -> None:
    before, after = moved("BF16", 1e-5)
    encoded = encode(after, before, 2)
    length = len(after)
    bomb = b"\1\1" + (1 << 10).to_bytes(4, "little")
    bomb += b"\2" + len(zlib.compress(bytes(1 << 22))).to_bytes(4, "little") + zlib.compress(bytes(1 << 22))
    for wrong, size, field in (
        (b"", length, "kind"),
        (b"\0", length, "bytes"),
        (b"\7" + encoded[1:], length, "kind"),
        (b"\1\3" + encoded[2:], length, "elements"),
        (encoded[:1] + b"\2" + (length).to_bytes(4, "little") + encoded[6:], length, "elements"),
        (encoded[:-1], length, "part"),
        (encoded + b"\0", length, "bytes"),
        (encoded[:6] + b"\x09" + encoded[7:], length, "form of a part"),
        (bomb, 1 << 10, "part"),
    ):
        with refused(InvalidValue, field=f"delta: {field}"):
            decode(wrong, bytes(size) if wrong is bomb else before, size)
