"""Checks that a report's token spans continue the responses that they belong to."""

from collections.abc import Mapping
from typing import Final

import numpy as np

from dora.data.token_spans import STOP, Column, TokenColumns
from dora.data.types import RoutingShape
from dora.orchestrator.rollout.responses.columns import ResponseColumns
from dora.orchestrator.rollout.responses.state import ReportError, ResponseState

LOGPROB_BYTES: Final = 4


def check_spans(
    columns: TokenColumns,
    buffered: Column,
    responses: ResponseColumns,
    by_row: Mapping[int, ResponseState],
    routing: RoutingShape | None,
) -> None:
    """Raises ReportError unless every span can be appended.

    ``buffered`` has the earlier tokens of each span's response. Responses retain ``routing``, or none if it is None.
    """
    rows, firsts, counts = columns.rows, columns.first_tokens, columns.counts
    max_tokens = responses.max_tokens[rows]
    reached, continues = firsts + counts, not np.count_nonzero(firsts != buffered)
    if not continues:
        reached = np.maximum(buffered, reached)
    if not continues or np.count_nonzero(reached > max_tokens) or np.count_nonzero(reached) < len(reached):
        for field, wrong, value, allowed in (
            ("first token", firsts > buffered, firsts, "{} or before"),
            ("tokens", reached > max_tokens, reached, "at most max_tokens, {}"),
            ("tokens", (columns.ends > 0) & (reached == 0), reached, "at least one in an ended response"),
        ):
            if wrong.any():
                index = int(wrong.argmax())
                limit = buffered if field == "first token" else max_tokens
                name = by_row[int(rows[index])].request_id
                raise ReportError(f"{name}: {field}", int(value[index]), allowed.format(int(limit[index])))
        for index in np.flatnonzero((firsts < buffered) & (counts > 0)).tolist():
            _check_repeated(by_row[int(rows[index])], columns, index)
    for index, stop in columns.stops.items():
        response = by_row[int(rows[index])]
        if stop and (columns.ends[index] != STOP or stop not in response.turn_sampling().stop):
            raise ReportError(f"{response.request_id}: stop", stop[:80], "one of its stop strings, at its end")
    if routing is not None or len(columns.routed_experts):
        _check_routing(columns, responses, by_row, routing)


def check_prompt_logprobs(columns: TokenColumns, owing: Mapping[int, ResponseState]) -> None:
    """Raises ReportError unless exactly the responses that owe prompt logprobs, by row, bring them with their turn's
    first token.
    """
    for index in columns.prompt_logprobs:
        row = int(columns.rows[index])
        if row not in owing:
            raise ReportError(f"row {row}: prompt_logprobs", "given", "none: they were not asked for, or have come")
    for index in np.flatnonzero(np.isin(columns.rows, list(owing))).tolist():
        response = owing[int(columns.rows[index])]
        begins = int(columns.first_tokens[index] + columns.counts[index]) > response.inputs[-1].end
        expected = (response.context_tokens() - 1) * LOGPROB_BYTES if begins else 0
        raw = columns.prompt_logprobs.get(index, b"")
        if len(raw) != expected:
            raise ReportError(f"{response.request_id}: prompt_logprobs bytes", len(raw), str(expected))


def _check_repeated(response: ResponseState, columns: TokenColumns, index: int) -> None:
    first, begin, count = (int(column[index]) for column in (columns.first_tokens, columns.begins, columns.counts))
    buffered = response.tokens[first : first + count]
    repeated = columns.token_ids[begin : begin + len(buffered)]
    if not np.array_equal(repeated, buffered):
        raise ReportError(f"{response.request_id}: tokens from {first} on", repeated[:8].tolist(), "those held")


def _check_routing(
    columns: TokenColumns,
    responses: ResponseColumns,
    by_row: Mapping[int, ResponseState],
    routing: RoutingShape | None,
) -> None:
    """Raises ReportError unless a span has a row of experts for each token fed to sample it, or none if unneeded."""
    rows, counts, lengths = columns.rows, columns.counts, columns.routed_bytes
    if routing is None:
        expected = np.zeros(len(columns), np.int64)
    else:
        begins = (columns.first_tokens == responses.turn_begins[rows]) & (counts > 0)
        expected = (counts + np.where(begins, responses.first_fed[rows] - 1, 0)) * routing.token_bytes
    wrong = lengths != expected
    if wrong.any():
        index = int(wrong.argmax())
        name = by_row[int(columns.rows[index])].request_id
        raise ReportError(f"{name}: routed_experts bytes", int(lengths[index]), str(int(expected[index])))
    if routing is not None:
        _check_experts(b"".join(columns.routed(index) for index in range(len(columns))), routing)


def _check_experts(raw: bytes, routing: RoutingShape) -> None:
    """Raises ReportError if a row names an expert that the model lacks, or the first two of a layer are the same one. A
    row that a kernel left empty repeats an expert.
    """
    ids = np.frombuffer(raw, f"<u{routing.id_bytes}").reshape(-1, routing.top_k)
    if ids.size and ids.max() >= routing.experts:
        raise ReportError("routed_experts", int(ids.max()), f"0 to {routing.experts - 1}, the experts of a layer")
    if routing.top_k > 1 and (ids[:, 0] == ids[:, 1]).any():
        raise ReportError("routed_experts", "an expert twice", f"{routing.top_k} experts of a layer")
