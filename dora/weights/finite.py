"""Detects non-finite numbers by their bit patterns: needs only numpy, also for dtypes that numpy lacks.

A floating point number is infinite or NaN if every bit of its exponent is set (IEEE 754; also bfloat16 and F8_E5M2).
F8_E4M3 has no infinity, and its NaN has every bit but the sign set (*FP8 Formats for Deep Learning*, section 3).
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from dora.errors import InvalidValue

_CHUNK_BYTES: Final = 1 << 20  # a multiple of every element size; fits a core's cache
_BITS: Final[Mapping[str, np.unsignedinteger[Any]]] = {
    "F64": np.uint64(0x7FF0_0000_0000_0000),
    "F32": np.uint32(0x7F80_0000),
    "F16": np.uint16(0x7C00),
    "BF16": np.uint16(0x7F80),
    "F8_E5M2": np.uint8(0x7C),
    "F8_E4M3": np.uint8(0x7F),
}


class FiniteCheck:
    """Checks tensors in chunks; needs a megabyte regardless of their sizes."""

    CHUNK_BYTES: Final = _CHUNK_BYTES

    def __init__(self) -> None:
        self._scratch = np.empty(_CHUNK_BYTES, np.uint8)

    def is_finite(self, content: memoryview, dtype: str) -> bool:
        """Whether every element of ``content``, little-endian, is finite. Integers and booleans always are."""
        bits = _BITS.get(dtype)
        if bits is None:
            return True
        for first in range(0, len(content), _CHUNK_BYTES):
            elements = np.frombuffer(content[first : first + _CHUNK_BYTES], bits.dtype)
            exponents = self._scratch.view(bits.dtype)[: len(elements)]
            if len(elements) and np.bitwise_and(elements, bits, out=exponents).max() == bits:
                return False
        return True


def not_finite(name: str, dtype: str) -> InvalidValue:
    return InvalidValue(f"weights: {name}", "inf or NaN", f"finite in every element, as {dtype}")
