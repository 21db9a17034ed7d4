"""A worker's responses, kept until the service has them durably.

A service that keeps its state may have lost a worker's latest reports, and a worker may continue without a service. So
each response is kept from its first token until its request is removed, or has ended and is settled. A session's is
kept between its turns, but expert rows only of its present turn, until that has ended and is settled.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from dora.data.input_digest import beginning_digest, input_digest
from dora.data.types import FinishReason, RequestSpec, SamplingParams, TokenDelta, inputs_after
from dora.rpc import dora_pb2 as pb

KEPT_BYTES_MAX: Final = 256 << 20
PIECE_BYTES: Final = 4 << 20  # of one response in one report
TOKEN_BYTES: Final = 8  # of a token's id and logprob


@dataclass(slots=True)
class _Response:
    version: int
    prompt_tokens: int
    token_ids: "array[int]"
    logprobs: "array[float]"
    first_kept: int  # the first token whose rows are kept
    inputs: list[tuple[int, int]]  # runs that its environment gave
    beginning: bytes  # of a session: its beginning_digest
    sampling: SamplingParams  # of the present turn
    routed: bytearray = field(default_factory=bytearray)  # rows of what was fed to sample from ``first_kept`` on
    finish_reason: FinishReason | None = None
    stop: str = ""
    prompt_logprobs: bytes = b""  # of the present turn, whose first token was sampled here

    @property
    def size_bytes(self) -> int:
        return TOKEN_BYTES * len(self.token_ids) + len(self.routed) + len(self.prompt_logprobs)

    @property
    def turn_begin(self) -> int:
        """The index of the present turn's first sampled token."""
        return self.inputs[-1][1] if self.inputs else 0

    def forget_rows(self) -> None:
        self.first_kept = len(self.token_ids)
        self.routed.clear()

    @property
    def token_bytes(self) -> int:
        end = self.prompt_tokens + len(self.token_ids) - 1
        return TOKEN_BYTES + (len(self.routed) // (end - self._fed_from(self.first_kept)) if self.routed else 0)

    def routed_between(self, first: int, end: int) -> bytes:
        if not self.routed:
            return b""
        row_bytes, begin = self.token_bytes - TOKEN_BYTES, self._fed_from(self.first_kept)
        rows = self._fed_from(first) - begin, self.prompt_tokens + end - 1 - begin
        return bytes(self.routed[rows[0] * row_bytes : rows[1] * row_bytes])

    def _fed_from(self, token: int) -> int:
        """Returns the position, prompt first, of the first row that comes with a token of the present turn: with a
        response's first the whole prompt's, with a turn's first those of the environment tokens and of the one before.
        """
        if not token:
            return 0
        before = self.inputs[-1][0] if token == self.turn_begin else token
        return self.prompt_tokens + before - 1


class Responses:
    """Responses by request.

    ``most_bytes`` bounds ended responses, and tokens since the service was lost. At the bound the worker stops
    stepping. The engine bounds the running ones.
    """

    def __init__(self, most_bytes: int = KEPT_BYTES_MAX) -> None:
        self._most_bytes = most_bytes
        self._kept: dict[str, _Response] = {}
        self._ended_bytes = 0
        self._alone_bytes = 0  # since the service is away, of what runs
        self._has_rows = False  # tokens come with rows
        self.is_alone = False  # the service is away

    @property
    def is_full(self) -> bool:
        return self._ended_bytes + self._alone_bytes >= self._most_bytes

    def begin(self, request: RequestSpec) -> None:
        self.forget(request.request_id)
        self._kept[request.request_id] = _Response(
            request.version,
            len(request.prompt_token_ids),
            array("i", request.output_token_ids),
            array("f", request.logprobs),
            len(request.output_token_ids),
            list(request.inputs),
            beginning_digest(request.prompt_token_ids) if request.keeps else b"",
            request.sampling,
        )

    def extend(self, request_id: str, given_token_ids: Sequence[int], sampling: SamplingParams, after: int) -> None:
        """Adds the next turn's environment tokens after a kept request's first ``after`` tokens; the others go."""
        response = self._kept[request_id]
        self._ended_bytes -= response.size_bytes
        response.inputs = inputs_after(response.inputs, after, len(given_token_ids))
        del response.token_ids[after:], response.logprobs[after:]
        response.token_ids.extend(given_token_ids)
        response.logprobs.extend([0.0] * len(given_token_ids))
        response.finish_reason, response.stop, response.sampling = None, "", sampling
        response.prompt_logprobs = b""
        response.forget_rows()  # a service that has lost tokens of earlier turns does not know of this one

    def add(self, deltas: Iterable[TokenDelta]) -> None:
        for delta in deltas:
            response = self._kept[delta.request_id]
            response.token_ids.extend(delta.token_ids)
            response.logprobs.extend(delta.logprobs)
            response.routed += delta.routed_experts
            self._has_rows |= bool(delta.routed_experts)
            if delta.prompt_logprobs:
                response.prompt_logprobs = delta.prompt_logprobs
            if self.is_alone:
                more_bytes = len(delta.routed_experts) + len(delta.prompt_logprobs)
                self._alone_bytes += TOKEN_BYTES * len(delta.token_ids) + more_bytes
            if delta.finish_reason is not None:
                response.finish_reason, response.stop = delta.finish_reason, delta.stop
                self._ended_bytes += response.size_bytes

    def settle(self, request_id: str) -> None:
        """Forgets an ended response that the service has durably, or the rows of a turn if it is of a session, which
        may go on. Unknown ids are ignored.
        """
        response = self._kept.get(request_id)
        if response is None or not response.beginning:
            self.forget(request_id)
        elif response.finish_reason is not None:
            self._ended_bytes -= len(response.routed)
            response.forget_rows()

    def forget(self, request_id: str) -> None:
        response = self._kept.pop(request_id, None)
        if response is not None and response.finish_reason is not None:
            self._ended_bytes -= response.size_bytes

    def clear(self) -> None:
        """Forgets all, since another version is loaded. Unsettled responses must be generated again if lost."""
        self._kept.clear()
        self._ended_bytes = 0

    def held(self) -> list[pb.HeldRequest]:
        return [
            pb.HeldRequest(
                request_id=request_id,
                tokens=len(each.token_ids),
                first_token=each.first_kept if self._has_rows else 0,
                given_digest=input_digest(each.beginning, each.sampling, each.token_ids, each.inputs),
                prompt_logprobs=bool(each.prompt_logprobs),
            )
            for request_id, each in self._kept.items()
        ]

    def come_back(self, goes_on: Mapping[str, int]) -> tuple[list[str], list[list[TokenDelta]]]:
        """Reconnects. ``goes_on`` has the service's token count of each request that continues.

        Returns the other requests, which are forgotten, and the tokens that the service lacks, in rounds; each round is
        one report, because reports are bounded.
        """
        self.is_alone, self._alone_bytes = False, 0
        over = [request_id for request_id in self._kept if request_id not in goes_on]
        for request_id in over:
            self.forget(request_id)
        rounds: list[list[TokenDelta]] = [[]]
        for request_id, tokens in goes_on.items():
            if request_id in self._kept:
                for number, piece in enumerate(self._after(request_id, tokens)):
                    rounds[number:] = rounds[number:] or [[]]
                    rounds[number].append(piece)
        return over, rounds

    def _after(self, request_id: str, tokens: int) -> Iterator[TokenDelta]:
        """Yields the tokens after the first ``tokens``, in pieces of at most ``PIECE_BYTES``; the last has the end."""
        response = self._kept[request_id]
        total, most = len(response.token_ids), max(1, PIECE_BYTES // response.token_bytes)
        while tokens < total or (tokens == total and response.finish_reason is not None):
            end = min(total, tokens + most)
            ends = end == total
            yield TokenDelta(
                request_id,
                response.version,
                tokens,
                tuple(response.token_ids[tokens:end]),
                tuple(response.logprobs[tokens:end]),
                response.finish_reason if ends else None,
                response.stop if ends else "",
                response.routed_between(tokens, end),
                response.prompt_logprobs if tokens <= response.turn_begin < end else b"",
            )
            if ends:
                return
            tokens = end
