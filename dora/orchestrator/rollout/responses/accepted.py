"""The result of accepting a worker's report: which tokens are new, which responses ended, which segments began.

The journal's record, the core's event and the latency figures are views of this one result.
"""

from dataclasses import dataclass, field

import numpy as np

from dora.core import events as on
from dora.data.token_spans import Column, TokenColumns
from dora.data.types import Arrival
from dora.journal import records


@dataclass(frozen=True, slots=True)
class BegunSegment:
    """Describes a response's first tokens on a worker."""

    index: int  # of the span that begins the segment
    first_token: int
    arrival: Arrival
    without_token_s: float | None  # since the response's last token on another worker; None: it had no token yet
    admitted_s: float | None = None  # of a response's first token: the time since the admission of its group


@dataclass(frozen=True, slots=True, eq=False)
class Accepted:
    """Holds a report after it was checked and appended. Columns have one value per span of ``columns``, in that order.

    If ``is_mixed``, nothing was appended, and ``columns`` has only the spans whose version is not their request's (C1).
    """

    worker_id: str
    version: int
    at: float
    columns: TokenColumns  # as the worker reported them
    numbers: Column  # of the requests in the journal; -1: of an evaluation
    before: Column  # tokens that each response had
    after: Column  # tokens that it has now
    routed_skips: Column  # bytes of the span's routed experts that belong to tokens which the response had
    segments: tuple[BegunSegment, ...] = ()
    ended: tuple[str, ...] = ()  # ids of the requests that ended, or whose turn did
    attempts: Column = field(default_factory=lambda: np.zeros(0, np.uint8))  # of sessions: replacements before
    shifts: Column = field(default_factory=lambda: np.zeros(0, np.int64))  # of sessions: tokens held on no path
    is_mixed: bool = False

    @property
    def new_tokens(self) -> int:
        return int((self.after - self.before).sum())

    def blackouts_ms(self) -> list[tuple[Arrival, float]]:
        """Returns each moved response's time without a token, and the way of its arrival."""
        waits = ((each.arrival, each.without_token_s) for each in self.segments)
        return [(arrival, without_s * 1000) for arrival, without_s in waits if without_s is not None]

    def first_tokens_s(self) -> list[float]:
        """Returns the times from admission to the first token of the responses that begin."""
        return [each.admitted_s for each in self.segments if each.admitted_s is not None]

    def event(self, epoch: int, waiting: int, kv_used_tokens: int) -> on.TokensReported:
        """Returns the core's event, with the worker's values."""
        rows, tokens = self.columns.rows.astype(np.int32), self.after.astype(np.int32)
        ends = self.columns.ends
        return on.TokensReported(self.worker_id, epoch, self.version, rows, tokens, ends, waiting, kv_used_tokens)

    def record(self) -> records.Tokens | None:
        """Returns the journal's record of new tokens and ends, or None if it would be empty.

        It leaves evaluations out, because they end with the service.
        """
        columns, counts = self.columns, self.after - self.before
        is_recorded = (self.numbers >= 0) & ((counts > 0) | (columns.ends > 0))
        recorded = np.count_nonzero(is_recorded)
        is_whole = recorded == len(counts)
        if self.is_mixed or not recorded:
            return None
        token_ids, logprobs = columns.token_ids, columns.logprobs
        total = int(counts.sum())
        if total < len(token_ids):  # some are repeated, or of spans that were left out
            begins = columns.begins + columns.counts - counts
            cells = np.repeat(begins - (np.cumsum(counts) - counts), counts) + np.arange(total)
            token_ids, logprobs = token_ids[cells], logprobs[cells]
        routed_bytes, routed = columns.routed_bytes[:0], b""
        if len(columns.routed_experts):
            routed_bytes = columns.routed_bytes - self.routed_skips
            routed = b"".join(columns.routed(index, skip) for index, skip in enumerate(self.routed_skips.tolist()))
        tokens = records.Tokens(
            self.at,
            self.numbers,
            self.before + self.shifts,
            counts,
            columns.ends if self.ended else columns.ends[:0],
            token_ids,
            logprobs,
            [[each.index, self.worker_id, each.first_token, each.arrival] for each in self.segments],
            [[index, stop] for index, stop in columns.stops.items()],
            routed_bytes,
            routed,
            attempts=self.attempts if np.count_nonzero(self.attempts) else self.attempts[:0],
            prompt_logprobs=[[index, raw] for index, raw in columns.prompt_logprobs.items()],
        )
        return tokens if is_whole else records.only(tokens, is_recorded)
