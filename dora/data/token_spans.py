"""The tokens of a worker's report in columns, and the same one by one: a *stretch* is what one request has got since.

Reports come by the thousand a second, so nothing in :class:`TokenColumns` is done token by token.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dora.data.types import FINISH_REASONS, FinishReason

Column = npt.NDArray[Any]

STOP: Final = FINISH_REASONS.index("stop")


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """What one request has got since it was last reported."""

    row: int
    first_token: int  # index of token_ids[0] within the response
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason | None = None
    stop: str = ""  # the stop string that these tokens completed
    routed_experts: bytes = b""  # rows of the tokens that were fed to sample these; empty: routing is not kept


@dataclass(frozen=True, slots=True, eq=False)
class TokenColumns:
    """Columns of ``len(rows)`` stretches: by stretch, but for ``token_ids`` and ``logprobs``, which go by token."""

    rows: Column  # int64
    first_tokens: Column  # int64
    counts: Column  # int64
    ends: Column  # uint8, indexes of FINISH_REASONS
    begins: Column  # int64: stretch i has the ``counts[i]`` tokens from ``begins[i]`` on
    token_ids: Column  # int32
    logprobs: Column  # float32
    stops: Mapping[int, str]
    routed_begins: Column  # int64: stretch i has the ``routed_bytes[i]`` bytes of routed_experts from there on
    routed_bytes: Column  # int64
    routed_experts: memoryview

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[TokenSpan]:
        """The stretches, unpacked."""
        for index in range(len(self)):
            tokens = slice(int(self.begins[index]), int(self.begins[index] + self.counts[index]))
            yield TokenSpan(
                int(self.rows[index]),
                int(self.first_tokens[index]),
                tuple(self.token_ids[tokens].tolist()),
                tuple(self.logprobs[tokens].tolist()),
                FINISH_REASONS[int(self.ends[index])],
                self.stops.get(index, ""),
                bytes(self.routed(index)),
            )

    def routed(self, index: int, skipped_bytes: int = 0) -> memoryview:
        """The rows of routed experts that came with a stretch, behind so many bytes of them."""
        begin = int(self.routed_begins[index])
        return self.routed_experts[begin + skipped_bytes : begin + int(self.routed_bytes[index])]

    def only(self, chosen: Column) -> "TokenColumns":
        """The same without all other stretches. ``chosen``: bool, one a stretch."""
        if chosen.all():
            return self
        names = ("rows", "first_tokens", "counts", "ends", "begins", "routed_begins", "routed_bytes")
        places = {index: place for place, index in enumerate(np.flatnonzero(chosen).tolist())}
        stops = {places[index]: stop for index, stop in self.stops.items() if index in places}
        return replace(self, stops=stops, **{name: getattr(self, name)[chosen] for name in names})
