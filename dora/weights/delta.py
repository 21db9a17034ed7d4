"""A lossless delta of a version against an earlier one, piece by piece. Less is sent if both ends have the base.

Weights after a small optimiser step differ in few elements (bfloat16, where most steps round to nothing) or in the low
bytes of each (float32). A piece is therefore XORed with the base's bytes at the same offset, and encoded as a bitmap of
changed elements followed by their bytes: all first bytes, all second bytes and so on. A part that is mostly zero is
deflated (zlib, RFC 1950); other parts are left as they are, as deflating them costs ten times the time and saves
nothing. A piece that would not shrink by a tenth is sent unencoded.

    encoded piece: kind (1 byte: 0 as it is, 1 changed), then
      0: the bytes
      1: bytes of an element (1), changed elements (4), then parts: form (1), length (4), bytes
         form: 0 zeros, 1 as it is, 2 deflated
"""

import struct
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any, Final

import numpy as np

from dora.errors import InvalidValue
from dora.weights.reference import DTYPE_BYTES, TensorHeader

Bytes = bytes | bytearray | memoryview
_WHOLE, _CHANGED = 0, 1
_ZEROS, _PLAIN, _DEFLATED = 0, 1, 2
_PAYS: Final = 0.9  # maximum size of an encoded piece, relative to the piece
_SPARSE: Final = 0.3  # maximum share of nonzero bytes in a part that is deflated
_LEVEL: Final = 1
_HEAD: Final = struct.Struct("<BBI")
_PART: Final = struct.Struct("<BI")
_ELEMENTS: Final = (1, 2, 4, 8)


def encode(content: Bytes, base: Bytes | None, element_bytes: int) -> bytes:
    """Encodes one piece. ``base`` has the base's bytes at the same offset, or None.

    ``element_bytes``, of the piece's main dtype (:func:`element_bytes_of`), affects the size, not the content.
    """
    if element_bytes not in _ELEMENTS:
        raise InvalidValue("element_bytes", element_bytes, f"one of {', '.join(map(str, _ELEMENTS))}")
    if base is None or len(base) != len(content) or len(content) % element_bytes:
        return bytes((_WHOLE,)) + bytes(content)
    parts, changed = _parts(content, base, element_bytes)
    encoded = b"".join((_HEAD.pack(_CHANGED, element_bytes, changed), *map(_packed, parts)))
    return encoded if len(encoded) < _PAYS * len(content) else bytes((_WHOLE,)) + bytes(content)


def decode(encoded: Bytes, base: Bytes | None, length: int) -> bytes:
    """Decodes the piece of ``length`` bytes that was given to :func:`encode`, exactly.

    Raises InvalidValue for invalid input, or if ``base`` is needed and missing. A wrong base is not detected here, but
    by the chunk's checksum.
    """
    view = memoryview(encoded)
    if len(view) >= 1 and view[0] == _WHOLE:
        if len(view) != length + 1:
            raise InvalidValue("delta: bytes", len(view) - 1, str(length))
        return bytes(view[1:])
    if len(view) < _HEAD.size or view[0] != _CHANGED:
        raise InvalidValue("delta: kind", bytes(view[:1]), f"{_WHOLE} or {_CHANGED}")
    _, element_bytes, changed = _HEAD.unpack_from(view)
    if base is None or len(base) != length:
        raise InvalidValue("delta: base", None if base is None else len(base), f"{length} bytes of the base version")
    if element_bytes not in _ELEMENTS or length % element_bytes or changed > length // element_bytes:
        raise InvalidValue("delta: elements", (element_bytes, changed), f"valid for a piece of {length} bytes")
    return _decoded(view[_HEAD.size :], base, element_bytes, changed)


def element_bytes_of(tensor: TensorHeader) -> int:
    return DTYPE_BYTES[tensor.dtype]


def element_bytes_at(elements: Sequence[tuple[int, int]], offset: int) -> int:
    """Returns the bytes of an element at ``offset`` in a file. ``elements`` has each tensor's end in it, and the bytes
    of its elements, in the order of the ends.
    """
    at = bisect_right(elements, offset, key=itemgetter(0))
    return elements[at][1] if at < len(elements) else 1


def _parts(content: Bytes, base: Bytes, element_bytes: int) -> tuple[list[Any], int]:
    """Returns the bitmap of changed elements, unless all or none changed, and their XOR, one plane per byte."""
    differs = np.bitwise_xor(np.frombuffer(content, np.uint8), np.frombuffer(base, np.uint8))
    elements = differs.view(f"<u{element_bytes}")
    changed = int(np.count_nonzero(elements))
    parts: list[Any] = []
    if not changed:
        return parts, 0
    if changed < len(elements):
        mask = elements != 0
        parts.append(np.packbits(mask))
        elements = elements[mask]
    planes = elements.view(np.uint8).reshape(-1, element_bytes)
    parts += [np.ascontiguousarray(planes[:, index]) for index in range(element_bytes)]
    return parts, changed


def _packed(part: Any) -> bytes:
    found = int(np.count_nonzero(part))
    if not found:
        return _PART.pack(_ZEROS, 0)
    if found < _SPARSE * len(part):
        deflated = zlib.compress(part, _LEVEL)
        if len(deflated) < len(part):
            return _PART.pack(_DEFLATED, len(deflated)) + deflated
    return _PART.pack(_PLAIN, len(part)) + part.tobytes()


def _decoded(view: memoryview, base: Bytes, element_bytes: int, changed: int) -> bytes:
    count = len(base) // element_bytes
    lengths = [] if not changed else [changed] * element_bytes
    if 0 < changed < count:
        lengths.insert(0, -(-count // 8))
    parts = [np.frombuffer(part, np.uint8) for part in _unpacked(view, lengths)]
    found = np.frombuffer(base, np.uint8).copy()
    if not changed:
        return found.tobytes()
    elements = found.view(f"<u{element_bytes}")
    planes = np.empty((changed, element_bytes), np.uint8)
    for index, plane in enumerate(parts[-element_bytes:]):
        planes[:, index] = plane
    moved = planes.reshape(-1).view(f"<u{element_bytes}")
    if changed == count:
        elements ^= moved
    else:
        mask = np.unpackbits(parts[0], count=count).view(bool)
        if int(np.count_nonzero(mask)) != changed:
            raise InvalidValue("delta: changed elements", int(np.count_nonzero(mask)), f"{changed}, as in its head")
        elements[mask] ^= moved
    return found.tobytes()


def _unpacked(view: memoryview, lengths: list[int]) -> Iterator[bytes]:
    for length in lengths:
        if len(view) < _PART.size:
            raise InvalidValue("delta: bytes", len(view), f"{_PART.size} or more, for a part's head")
        form, held = _PART.unpack_from(view)
        body, view = view[_PART.size : _PART.size + held], view[_PART.size + held :]
        if form == _ZEROS:
            part = bytes(length)
        elif form == _PLAIN:
            part = bytes(body)
        elif form == _DEFLATED:
            part = _inflated(body, length)
        else:
            raise InvalidValue("delta: form of a part", form, f"{_ZEROS}, {_PLAIN} or {_DEFLATED}")
        if len(body) != held or len(part) != length or (form == _ZEROS and held):
            raise InvalidValue("delta: bytes of a part", len(part), str(length))
        yield part
    if view:
        raise InvalidValue("delta: bytes", f"{len(view)} too many", "none after the last part")


def _inflated(body: memoryview, length: int) -> bytes:
    stream = zlib.decompressobj()
    try:
        part = stream.decompress(body, length + 1)  # never more, whatever its header claims
    except zlib.error as error:
        raise InvalidValue("delta: part", bytes(body[:16]), f"deflated by zlib ({error})") from error
    if not stream.eof:
        raise InvalidValue("delta: part", bytes(body[:16]), f"deflated by zlib, with {length} bytes")
    return part
