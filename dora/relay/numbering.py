"""Numbers the chunks of a version, file after file in the order of its manifest, for messages between relays."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from struct import Struct
from typing import Final

from dora.errors import TransferFailed
from dora.weights.manifest import Manifest

_RUN: Final = Struct("<II")
RUNS_MAX: Final = 1 << 20  # of a list of chunks: 8 MiB


class Numbering:
    """Maps chunk ``number`` of the version to chunk ``index`` of ``file``."""

    def __init__(self, manifest: Manifest) -> None:
        self._files = manifest.files
        self._firsts = list(accumulate((file.chunks for file in manifest.files), initial=0))
        self._first_of = dict(zip((file.name for file in manifest.files), self._firsts, strict=False))

    @property
    def chunks(self) -> int:
        return self._firsts[-1]

    def place(self, number: int) -> tuple[str, int]:
        at = bisect_right(self._firsts, number) - 1
        return self._files[at].name, number - self._firsts[at]

    def number(self, file: str, index: int) -> int:
        return self._first_of[file] + index

    def chunk_bytes(self, number: int) -> int:
        at = bisect_right(self._firsts, number) - 1
        return self._files[at].chunk(number - self._firsts[at])[1]


def runs_of(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yields ascending numbers as runs without a gap: the first number and the count."""
    first = count = 0
    for number in numbers:
        if count and number == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = number, 1
    if count:
        yield first, count


def packed(numbers: Iterable[int]) -> bytes:
    return b"".join(_RUN.pack(first, count) for first, count in runs_of(numbers))


def unpacked(body: bytes, chunks: int) -> Sequence[tuple[int, int]]:
    """Decodes the runs of a version of ``chunks`` chunks. Raises TransferFailed unless ``packed`` wrote them."""
    if len(body) % _RUN.size or len(body) > RUNS_MAX * _RUN.size:
        raise TransferFailed(f"a list of chunks in {len(body)} bytes")
    found = list(_RUN.iter_unpack(body))
    ascending = all(one[0] + one[1] < other[0] for one, other in pairwise(found))
    if not ascending or any(not count or first + count > chunks for first, count in found):
        raise TransferFailed(f"a list of chunks that are not those of a version of {chunks}, in order")
    return found
