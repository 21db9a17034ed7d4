"""One response while it is generated: its tokens, byte for byte as they were reported."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from dora.data.given_digest import given_digest
from dora.data.trajectory import Float32Array, Int32Array, Trajectory, Uint8Array
from dora.data.trajectory_fields import ExpertArray, expert_rows
from dora.data.types import (
    GIVEN,
    Arrival,
    EnvironmentEvent,
    FinishReason,
    Prompt,
    RequestSpec,
    Reward,
    RoutingShape,
    SamplingParams,
    Segment,
)
from dora.errors import InvalidValue
from dora.rpc import packed

TOKEN: Final = packed.TOKEN  # the buffer's layout of a token


class ReportError(InvalidValue):
    """A report that does not continue the response buffer: a bug in a worker, which must be replaced."""

    REFUSED = "does not continue the response"


@dataclass(slots=True)
class SegmentStart:
    """The first token of a segment, its worker, and how the request arrived there."""

    worker_id: str
    first_token: int
    arrival: Arrival


@dataclass(frozen=True, slots=True)
class GivenRun:
    """Tokens of a session that its environment gave. They begin a turn of at most ``max_tokens`` sampled tokens."""

    first_token: int
    tokens: int
    max_tokens: int
    name: str  # of what gave them
    before: FinishReason  # how the turn before ended
    stop_before: str  # the stop string that ended it
    at: float

    @property
    def end(self) -> int:
        """The index of the turn's first sampled token."""
        return self.first_token + self.tokens


@dataclass(slots=True)
class ResponseState:
    """One response while it is generated."""

    row: int  # its name in the core and in workers' reports
    request_id: str
    group_id: str
    prompt: Prompt
    sample_index: int
    version: int
    sampling: SamplingParams
    started_at: float
    routing: RoutingShape | None = None  # of the expert rows that come with its tokens; None: none do
    finished_at: float = 0.0
    delivered: bytearray = field(default_factory=bytearray)  # one TOKEN per token
    routed: bytearray = field(default_factory=bytearray)  # expert rows of the tokens that were fed, as first reported
    segment_starts: list[SegmentStart] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str = ""  # the stop string that ended it
    reward: Reward | None = None
    arrivals: dict[str, Arrival] = field(default_factory=dict)  # worker -> kind of a pending arrival there
    window_versions: int = 0  # size of the window at admission
    number: int = -1  # in the journal; -1: of an evaluation
    attempt: int = 0  # sessions: replacements before it
    given: list[GivenRun] = field(default_factory=list)  # sessions: one for each turn but the first
    is_closed: bool = False  # sessions: its environment has ended it, or it was broken off

    @property
    def is_session(self) -> bool:
        return bool(self.prompt.environment)

    def turn_begin(self, turn: int) -> int:
        """The index of a turn's first sampled token. ``turn``: from 0 to ``len(given)``."""
        return self.given[turn - 1].end if turn else 0

    def turn_end(self, turn: int) -> int:
        """One after a turn's last sampled token so far."""
        return self.given[turn].first_token if turn < len(self.given) else len(self)

    def __len__(self) -> int:
        """The number of delivered tokens."""
        return len(self.delivered) // TOKEN.itemsize

    @property
    def tokens(self) -> Int32Array:
        """The ids of the delivered tokens, a copy."""
        return np.frombuffer(self.delivered, TOKEN)["token_id"].copy()

    @property
    def logprobs(self) -> Float32Array:
        """The logprobs of the delivered tokens, a copy."""
        return np.frombuffer(self.delivered, TOKEN)["logprob"].copy()

    def spec(self) -> RequestSpec:
        """The engine's input to begin the request, or to continue after the delivered tokens."""
        sampling = self.sampling
        if self.given:
            sampling = replace(sampling, max_tokens=self.given[-1].max_tokens)
        return RequestSpec(
            self.request_id,
            self.version,
            self.prompt.token_ids,
            sampling,
            tuple(self.tokens.tolist()),
            tuple(self.logprobs.tolist()),
            self.is_session,
            tuple((run.first_token, run.end) for run in self.given),
        )

    def continues(self, tokens: int, digest: bytes) -> bool:
        """Returns whether a process with so many of this session's tokens, and this digest of the given ones, has all
        of this history, but for the given tokens of a turn that was just asked.
        """
        runs = [(run.first_token, run.end) for run in self.given]
        has = len(self)
        if runs and tokens == runs[-1][0]:  # the next turn was asked, and it does not know yet
            has = runs.pop()[0]
        return tokens >= has and digest == given_digest(self.tokens, runs)

    def loss_mask(self) -> Uint8Array:
        """1 for each sampled token, 0 for each given one."""
        mask = np.ones(len(self), np.uint8)
        for run in self.given:
            mask[run.first_token : run.end] = 0
        return mask

    def events(self) -> tuple[EnvironmentEvent, ...]:
        """The environment's turns."""
        return tuple(EnvironmentEvent(run.end, GIVEN, run.name, "", run.at) for run in self.given)

    def worker_history(self) -> tuple[Segment, ...]:
        """The segments of the response: which worker sampled which tokens."""
        segments, end = [], len(self)
        for segment_start in reversed(self.segment_starts):
            segments.append(
                Segment(
                    segment_start.worker_id, segment_start.first_token, end - 1, segment_start.arrival, self.version
                )
            )
            end = segment_start.first_token
        return tuple(reversed(segments))

    def trajectory(self, step: int, reference_version: int) -> Trajectory:
        """The finished response as the trainer of ``step`` gets it."""
        return Trajectory(**{name: read(self) for name, read in readers(step, reference_version).items()})

    def verdict(self) -> Reward:
        """The reward of a finished response."""
        assert self.reward is not None and self.finish_reason is not None, f"{self.request_id} is not finished"
        return self.reward

    def stop_reason(self) -> str | int | None:
        """The stop string or stop token id that ended it; None for an end-of-sequence token or a length limit."""
        if self.finish_reason != "stop":
            return None
        if self.stop or not self.sampling.stop_token_ids:
            return self.stop or None
        last = int(np.frombuffer(self.delivered, TOKEN)["token_id"][-1])
        return last if last in self.sampling.stop_token_ids else None

    def routed_experts(self) -> ExpertArray | None:
        if self.routing is None:
            return None
        return expert_rows(self.routed, self.routing.layers, self.routing.top_k, self.routing.id_bytes)


_READERS: Final[Mapping[str, Callable[[ResponseState], Any]]] = {
    "trajectory_id": lambda entry: entry.request_id,
    "group_id": lambda entry: entry.group_id,
    "prompt_id": lambda entry: entry.prompt.prompt_id,
    "task_id": lambda entry: entry.prompt.task_id,
    "sample_index": lambda entry: entry.sample_index,
    "group_size": lambda entry: entry.prompt.group_size,
    "behaviour_version": lambda entry: entry.version,
    "prompt_token_ids": lambda entry: entry.prompt.token_ids,
    "response_token_ids": lambda entry: entry.tokens,
    "logprobs": lambda entry: entry.logprobs,
    "loss_mask": ResponseState.loss_mask,
    "sampling": lambda entry: entry.sampling,
    "reward": lambda entry: reward.value if (reward := entry.verdict()).valid else math.nan,
    "reward_valid": lambda entry: entry.verdict().valid,
    "reward_components": lambda entry: entry.verdict().components,
    "verifier_log": lambda entry: entry.verdict().log,
    "finish_reason": lambda entry: entry.finish_reason,
    "started_at": lambda entry: entry.started_at,
    "finished_at": lambda entry: entry.finished_at,
    "worker_history": ResponseState.worker_history,
    "length_tokens": len,
    "events": ResponseState.events,
    "stop_reason": ResponseState.stop_reason,
    "window_versions": lambda entry: entry.window_versions,
    "routed_experts": ResponseState.routed_experts,
}


def readers(step: int, reference_version: int) -> Mapping[str, Callable[[ResponseState], Any]]:
    """The value of each field of a trajectory, by the field's name. ``step``: the one that takes the response."""
    return {
        **_READERS,
        "reference_version": lambda _: reference_version,
        "trained_step": lambda _: step,
        "staleness": lambda entry: step - entry.version,
    }
