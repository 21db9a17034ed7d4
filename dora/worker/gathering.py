"""Collects the sampled tokens of a worker's engine by request until they are reported."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from dora.data.token_spans import TokenSpan
from dora.data.types import FinishReason, TokenDelta
from dora.rpc import dora_pb2 as pb
from dora.rpc.channel import BATCH_BYTES
from dora.rpc.columns import columns_to_wire

TOKEN_BYTES: Final = 8  # of a token's id and logprob


@dataclass(slots=True)
class _Gathered:
    """One request's new tokens."""

    first_token: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str = ""
    routed_experts: bytearray = field(default_factory=bytearray)
    prompt_logprobs: bytes = b""


class Gathering:
    """Tokens of one version by request, and the row of each request that the engine holds."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._gathered: dict[str, _Gathered] = {}
        self.version: int | None = None  # that sampled what is here; None: nothing is
        self.has_ends = False

    def __bool__(self) -> bool:
        return bool(self._gathered)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._gathered

    def name(self, request_id: str, row: int) -> None:
        self._rows[request_id] = row

    def forget(self, request_id: str) -> None:
        """Forgets a request that left the engine. Its collected tokens must be reported before."""
        self._rows.pop(request_id, None)

    def takes(self, deltas: Iterable[TokenDelta]) -> bool:
        return not self._gathered or all(delta.version == self.version for delta in deltas)

    def add(self, deltas: Iterable[TokenDelta]) -> None:
        for delta in deltas:
            self.version = delta.version
            gathered = self._gathered.get(delta.request_id)
            if gathered is None:
                gathered = self._gathered[delta.request_id] = _Gathered(delta.first_token)
            gathered.token_ids.extend(delta.token_ids)
            gathered.logprobs.extend(delta.logprobs)
            gathered.routed_experts += delta.routed_experts
            if delta.prompt_logprobs:
                gathered.prompt_logprobs = delta.prompt_logprobs
            if delta.finish_reason is not None:
                gathered.finish_reason, gathered.stop = delta.finish_reason, delta.stop
                self.has_ends = True

    def take(self, ends_only: bool = False) -> list[pb.TokenColumns]:
        """Removes and returns everything, in messages of about ``BATCH_BYTES``; rows of long prompts need several.

        ``ends_only`` limits this to requests that have ended.
        """
        gathered_of, left = self._gathered, {}
        if ends_only:
            left = {name: each for name, each in gathered_of.items() if each.finish_reason is None}
            gathered_of = {name: each for name, each in gathered_of.items() if each.finish_reason is not None}
        spans = [
            TokenSpan(
                self._rows[request_id],
                gathered.first_token,
                tuple(gathered.token_ids),
                tuple(gathered.logprobs),
                gathered.finish_reason,
                gathered.stop,
                bytes(gathered.routed_experts),
                gathered.prompt_logprobs,
            )
            for request_id, gathered in gathered_of.items()
        ]
        for request_id, gathered in gathered_of.items():
            if gathered.finish_reason is not None:
                self.forget(request_id)
        self._gathered, self.has_ends = left, False
        self.version = self.version if left else None
        return [columns_to_wire(batch) for batch in _batches(spans)]


def _batches(spans: list[TokenSpan]) -> Iterator[list[TokenSpan]]:
    batch: list[TokenSpan] = []
    held_bytes = 0
    for span in spans:
        span_bytes = TOKEN_BYTES * len(span.token_ids) + len(span.routed_experts) + len(span.prompt_logprobs)
        if batch and held_bytes + span_bytes > BATCH_BYTES:
            yield batch
            batch, held_bytes = [], 0
        batch.append(span)
        held_bytes += span_bytes
    if batch:
        yield batch
