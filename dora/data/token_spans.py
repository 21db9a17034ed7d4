"""The tokens of a worker's report as columns, and as token spans: a *span* is the new tokens of one request.

Reports arrive by the thousand per second, so nothing in :class:`TokenColumns` is done token by token.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dora.data.types import FINISH_REASONS, FinishReason

Column = npt.NDArray[Any]

STOP: Final = FINISH_REASONS.index("stop")


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """The tokens of one request since its last report."""

    row: int
    first_token: int  # index of token_ids[0] within the response
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason | None = None
    stop: str = ""  # the stop string that these tokens completed
    # expert rows of the tokens that were fed to sample these; empty: routing is not recorded
    routed_experts: bytes = b""
    prompt_logprobs: bytes = b""  # float32, as in TokenDelta


@dataclass(frozen=True, slots=True, eq=False)
class TokenColumns:
    """Columns of ``len(rows)`` spans: one cell a span, except ``token_ids`` and ``logprobs``, with one a token."""

    rows: Column  # int64
    first_tokens: Column  # int64
    counts: Column  # int64
    ends: Column  # uint8, indexes of FINISH_REASONS
    begins: Column  # int64: span i has the ``counts[i]`` tokens from ``begins[i]`` on
    token_ids: Column  # int32
    logprobs: Column  # float32
    stops: Mapping[int, str]
    routed_begins: Column  # int64: span i has the ``routed_bytes[i]`` bytes of routed_experts from there on
    routed_bytes: Column  # int64
    routed_experts: memoryview
    prompt_logprobs: Mapping[int, bytes] = field(default_factory=dict)  # by span, as in TokenDelta

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[TokenSpan]:
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
                self.prompt_logprobs.get(index, b""),
            )

    def routed(self, index: int, skipped_bytes: int = 0) -> memoryview:
        """The expert rows of a span, after the first ``skipped_bytes``."""
        begin = int(self.routed_begins[index])
        return self.routed_experts[begin + skipped_bytes : begin + int(self.routed_bytes[index])]

    def only(self, chosen: Column) -> "TokenColumns":
        """Returns the chosen spans alone. ``chosen`` has one bool a span."""
        if np.count_nonzero(chosen) == len(chosen):
            return self
        names = ("rows", "first_tokens", "counts", "ends", "begins", "routed_begins", "routed_bytes")
        places = {index: place for place, index in enumerate(np.flatnonzero(chosen).tolist())}
        stops = {places[index]: stop for index, stop in self.stops.items() if index in places}
        of_prompts = {places[index]: raw for index, raw in self.prompt_logprobs.items() if index in places}
        columns = {name: getattr(self, name)[chosen] for name in names}
        return replace(self, stops=stops, prompt_logprobs=of_prompts, **columns)
