"""The tokens of a worker's report on the wire: packed, read as columns over the message's own bytes, unpacked."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from dora.data.token_spans import Column, TokenColumns, TokenSpan
from dora.data.types import FINISH_REASONS
from dora.errors import InvalidValue
from dora.rpc import dora_pb2 as pb

_NUMBER: Final = {reason: number for number, reason in enumerate(FINISH_REASONS)}
_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "rows": np.dtype("<u4"),
    "first_tokens": np.dtype("<u4"),
    "counts": np.dtype("<u4"),
    "ends": np.dtype("u1"),
    "token_ids": np.dtype("<i4"),
    "logprobs": np.dtype("<f4"),
    "routed_bytes": np.dtype("<u4"),
}


def columns_to_wire(spans: Iterable[TokenSpan]) -> pb.TokenColumns:
    """Packs token spans, each of another request."""
    listed = list(spans)
    columns: dict[str, list[Any]] = {
        "rows": [each.row for each in listed],
        "first_tokens": [each.first_token for each in listed],
        "counts": [len(each.token_ids) for each in listed],
        "ends": [_NUMBER[each.finish_reason] for each in listed] if any(each.finish_reason for each in listed) else [],
        "token_ids": [token_id for each in listed for token_id in each.token_ids],
        "logprobs": [logprob for each in listed for logprob in each.logprobs],
        "routed_bytes": [len(each.routed_experts) for each in listed] if any(e.routed_experts for e in listed) else [],
    }
    return pb.TokenColumns(
        **{name: np.array(values, _DTYPES[name]).tobytes() for name, values in columns.items()},
        stops=[pb.StopCompleted(span=index, stop=each.stop) for index, each in enumerate(listed) if each.stop],
        routed_experts=b"".join(each.routed_experts for each in listed),
        prompt_logprobs=[
            pb.PromptLogprobs(span=index, logprobs=each.prompt_logprobs)
            for index, each in enumerate(listed)
            if each.prompt_logprobs
        ],
    )


def columns_from_wire(message: pb.TokenColumns) -> TokenColumns:
    """Unpacks token spans. Raises InvalidValue if columns' lengths differ, a row occurs twice, or an end is invalid."""
    found = {name: _column(getattr(message, name), name) for name in _DTYPES}
    rows = found["rows"].astype(np.int64)
    for name in ("ends", "routed_bytes"):  # empty: all are 0
        if not len(found[name]):
            found[name] = np.zeros(len(rows), _DTYPES[name])
    for name in ("first_tokens", "counts", "ends", "routed_bytes"):
        if len(found[name]) != len(rows):
            raise InvalidValue(name, len(found[name]), f"one per row, that is {len(rows)}")
    counts, routed_bytes = found["counts"].astype(np.int64), found["routed_bytes"].astype(np.int64)
    begins, end = _begins(counts)
    routed_begins, routed_end = _begins(routed_bytes) if message.routed_bytes else (routed_bytes, 0)
    for name, length, expected in (
        ("token_ids", len(found["token_ids"]), end),
        ("logprobs", len(found["logprobs"]), end),
        ("routed_experts: bytes", len(message.routed_experts), routed_end),
    ):
        if length != expected:
            raise InvalidValue(name, length, f"{expected}, as many as the stretches have")
    if message.ends and found["ends"].max() >= len(FINISH_REASONS):
        raise InvalidValue("ends", int(found["ends"].max()), "0 while running, 1 (stop) or 2 (length)")
    if len(named := set(listed := rows.tolist())) < len(listed):
        twice = next(row for row in sorted(named) if listed.count(row) > 1)
        raise InvalidValue("rows", twice, "each row once")
    stops = {each.span: each.stop for each in message.stops}
    if len(stops) < len(message.stops) or any(index >= len(rows) for index in stops):
        raise InvalidValue("stops", sorted(stops), f"each of another stretch, of {len(rows)}")
    of_prompts = {each.span: each.logprobs for each in message.prompt_logprobs}
    if len(of_prompts) < len(message.prompt_logprobs) or any(index >= len(rows) for index in of_prompts):
        raise InvalidValue("prompt_logprobs", sorted(of_prompts), f"each of another stretch, of {len(rows)}")
    return TokenColumns(
        rows,
        found["first_tokens"].astype(np.int64),
        counts,
        found["ends"],
        begins,
        found["token_ids"],
        found["logprobs"],
        stops,
        routed_begins,
        routed_bytes,
        memoryview(message.routed_experts),
        of_prompts,
    )


def _begins(counts: Column) -> tuple[Column, int]:
    reached = counts.cumsum()
    return reached - counts, int(reached[-1]) if len(reached) else 0


def _column(content: bytes, name: str) -> Column:
    dtype = _DTYPES[name]
    if len(content) % dtype.itemsize:
        raise InvalidValue(
            f"{name}: bytes", len(content), f"a multiple of {dtype.itemsize} (little-endian {dtype.name})"
        )
    return np.frombuffer(content, dtype)
