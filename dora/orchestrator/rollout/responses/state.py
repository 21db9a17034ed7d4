"""One response while it is generated: its tokens, byte for byte as they were reported."""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from dora.data.growth import members_started
from dora.data.input_digest import beginning_digest, input_digest
from dora.data.token_spans import Column
from dora.data.trajectory import Float32Array, Int32Array
from dora.data.trajectory_fields import ExpertArray, expert_rows
from dora.data.types import (
    Arrival,
    FinishReason,
    Prompt,
    RequestSpec,
    Reward,
    RoutingShape,
    SamplingParams,
    Segment,
)
from dora.errors import InvalidValue
from dora.orchestrator.rollout.responses.session_paths import (
    InputRun,
    bounds,
    first_fed,
    fork_of,
    places,
    prompt_of,
    runs_on,
    shift_of,
)
from dora.rpc import packed

TOKEN: Final = packed.TOKEN  # the buffer's layout of a token


class ReportError(InvalidValue):
    """Says that a report does not continue the response buffer: a bug in a worker, which must be replaced."""

    REFUSED = "does not continue the response"


@dataclass(slots=True)
class SegmentStart:
    """Holds the first token of a segment, its worker, and how the request arrived there."""

    worker_id: str
    first_token: int
    arrival: Arrival
    at: float = field(default=0.0, compare=False)  # when that token came; 0: to an earlier process
    left_at: float = field(default=0.0, compare=False)  # when the token before it did, elsewhere; 0: there was none


@dataclass(slots=True)
class ResponseState:
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
    inputs: list[InputRun] = field(default_factory=list)  # sessions: one for each turn but number 0
    turn_begins: dict[int, float] | None = field(default=None, compare=False)  # sessions: first tokens, this process
    turn_ends: dict[int, float] | None = field(default=None, compare=False)  # sessions: when turns ended, this process
    is_closed: bool = False  # sessions: its environment has ended it, or it was broken off
    prompt_logprobs: bytes = b""  # sessions: float32, of the present turn, once they have come

    @property
    def is_session(self) -> bool:
        return bool(self.prompt.environment)

    @property
    def is_evaluation(self) -> bool:
        """Returns whether an evaluation asked for it: no step trains on it, and the journal does not have it."""
        return self.number < 0

    def turn_begin(self, turn: int) -> int:
        """Returns the index of a turn's first sampled token among all tokens. Turns count from 0 to ``len(inputs)``."""
        return self.inputs[turn - 1].buffer_end if turn else 0

    def turn_end(self, turn: int) -> int:
        """Returns one after the index of a turn's last sampled token so far."""
        return self.inputs[turn].buffer_begin if turn < len(self.inputs) else self.buffered_tokens

    def path_tokens(self, turn: int) -> int:
        """Returns the number of response tokens on the path of a turn so far."""
        return self.turn_end(turn) - shift_of(self.inputs, turn)

    def is_on_path(self, turn: int, tokens: int) -> bool:
        """Returns whether the first ``tokens`` response tokens on the path of a turn are on the present path too."""
        inputs, last = self.inputs, len(self.inputs)
        if prompt_of(inputs, turn) is not prompt_of(inputs, last):
            return False
        ours, theirs = places(inputs, last, self.buffered_tokens), places(inputs, turn, self.turn_end(turn))
        return np.array_equal(ours[:tokens], theirs[:tokens])

    def end_of(self, turn: int) -> tuple[FinishReason | None, str]:
        """Returns how a turn has ended, with the stop string that ended it."""
        if turn < len(self.inputs):
            return self.inputs[turn].before, self.inputs[turn].stop_before
        return self.finish_reason, self.stop

    @property
    def buffered_tokens(self) -> int:
        """Returns the number of delivered tokens, in all branches."""
        return len(self.delivered) // TOKEN.itemsize

    def __len__(self) -> int:
        """Returns the number of response tokens in the present branch."""
        return self.buffered_tokens - shift_of(self.inputs)

    def buffered(self) -> Column:
        """Returns a view of the delivered tokens, TOKENs, in which nothing may be kept."""
        return np.frombuffer(self.delivered, TOKEN)

    def _present(self) -> Column:
        if not shift_of(self.inputs):
            return self.buffered()
        return self.buffered()[places(self.inputs, len(self.inputs), self.buffered_tokens)]

    @property
    def tokens(self) -> Int32Array:
        """Returns a copy of the response's token ids."""
        return self._present()["token_id"].copy()

    @property
    def logprobs(self) -> Float32Array:
        """Returns a copy of the response tokens' logprobs."""
        return self._present()["logprob"].copy()

    def prompt_ids(self, turn: int = -1) -> tuple[int, ...]:
        """Returns the prompt of a turn's path (-1: the present one), the group's or the one from the environment."""
        run = prompt_of(self.inputs, len(self.inputs) if turn < 0 else turn)
        if run is None:
            return self.prompt.token_ids
        return tuple(self.buffered()["token_id"][run.buffer_begin : run.buffer_end].tolist())

    @property
    def owes_prompt(self) -> bool:
        """Returns whether prompt logprobs of the present turn were asked for and are still to come."""
        return (
            bool(self.inputs) and self.inputs[-1].prompt_logprobs and self.buffered_tokens == self.inputs[-1].buffer_end
        )

    def first_fed(self) -> int:
        """Returns ``session_paths.first_fed`` of the present turn."""
        return first_fed(self.inputs, len(self.inputs), len(self.prompt.token_ids))

    def context_tokens(self) -> int:
        """Returns the number of tokens before the present turn's sampled ones, on its path."""
        run, first = self.inputs[-1], prompt_of(self.inputs, len(self.inputs))
        return run.end + (len(self.prompt.token_ids) if first is None else first.tokens)

    def branch_sampling(self, turn: int = -1) -> SamplingParams:
        """Returns the sampling parameters of a turn's branch (-1: the present one), each with a seed of its own."""
        fork = fork_of(self.inputs, len(self.inputs) if turn < 0 else turn)
        return reseeded(self.sampling, f"/{fork}") if fork else self.sampling

    def turn_sampling(self, turn: int = -1) -> SamplingParams:
        """Returns the sampling parameters of a turn (-1: the present one): its branch's, and its own."""
        turn = len(self.inputs) if turn < 0 else turn
        if not turn:
            return self.sampling
        run = self.inputs[turn - 1]
        return replace(self.branch_sampling(turn), max_tokens=run.max_tokens, **run.sampling)  # type: ignore[arg-type]

    def spec(self) -> RequestSpec:
        """Returns the engine's input to begin the request, or to continue after the delivered tokens."""
        return RequestSpec(
            self.request_id,
            self.version,
            self.prompt_ids(),
            self.turn_sampling(),
            tuple(self.tokens.tolist()),
            tuple(self.logprobs.tolist()),
            self.is_session,
            tuple(self.input_bounds()),
            prompt_logprobs=self.owes_prompt,
        )

    def input_bounds(self) -> list[tuple[int, int]]:
        """Returns the input runs of the present path: (first, one after the last)."""
        return bounds(runs_on(self.inputs, len(self.inputs)))

    def continues(self, tokens: int, digest: bytes, *, has_prompt_logprobs: bool = False) -> bool:
        """Returns whether a process with so many tokens of this session, and this digest of the given ones, has all of
        the present branch but for the environment tokens of a turn that was just requested. If it has sampled some of a
        turn whose prompt logprobs are still to come, it must have these.
        """
        if self.owes_prompt and tokens > len(self) and not has_prompt_logprobs:
            return False
        runs, has, turn = self.input_bounds(), len(self), len(self.inputs)
        if runs and tokens == runs[-1][0] and not self.inputs[-1].is_fork:  # it does not know of the next turn yet
            has, turn = runs.pop()[0], turn - 1
        beginning = beginning_digest(self.prompt_ids())
        return tokens >= has and digest == input_digest(beginning, self.turn_sampling(turn), self.tokens, runs)

    def worker_history(self) -> tuple[Segment, ...]:
        """Returns the segments among all tokens, which say which worker sampled which."""
        segments, end = [], self.buffered_tokens
        for segment_start in reversed(self.segment_starts):
            segments.append(
                Segment(
                    segment_start.worker_id, segment_start.first_token, end - 1, segment_start.arrival, self.version
                )
            )
            end = segment_start.first_token
        return tuple(reversed(segments))

    def verdict(self) -> Reward:
        assert self.reward is not None and self.finish_reason is not None, f"{self.request_id} is not finished"
        return self.reward

    def stop_reason(self, turn: int = 0) -> str | int | None:
        """Returns the stop string or token id that ended a turn, or None for end of sequence or a length limit."""
        finish_reason, stop = self.end_of(turn)
        if finish_reason != "stop":
            return None
        stop_token_ids = self.turn_sampling(turn).stop_token_ids
        if stop or not stop_token_ids:
            return stop or None
        last = int(self.buffered()["token_id"][self.turn_end(turn) - 1])
        return last if last in stop_token_ids else None

    def routed_experts(self) -> ExpertArray | None:
        if self.routing is None:
            return None
        return expert_rows(self.routed, self.routing.layers, self.routing.top_k, self.routing.id_bytes)


_READERS: Final[Mapping[str, Callable[[ResponseState], Any]]] = {
    "trajectory_id": lambda response: response.request_id,
    "group_id": lambda response: response.group_id,
    "prompt_id": lambda response: response.prompt.prompt_id,
    "task_id": lambda response: response.prompt.task_id,
    "sample_index": lambda response: response.sample_index,
    "behaviour_version": lambda response: response.version,
    "prompt_token_ids": lambda response: response.prompt.token_ids,
    "response_token_ids": lambda response: response.tokens,
    "logprobs": lambda response: response.logprobs,
    "loss_mask": lambda response: np.ones(len(response), np.uint8),
    "sampling": lambda response: response.sampling,
    "reward": lambda response: reward.value if (reward := response.verdict()).valid else math.nan,
    "reward_valid": lambda response: response.verdict().valid,
    "reward_components": lambda response: response.verdict().components,
    "verifier_log": lambda response: response.verdict().log,
    "finish_reason": lambda response: response.finish_reason,
    "started_at": lambda response: response.started_at,
    "finished_at": lambda response: response.finished_at,
    "worker_history": ResponseState.worker_history,
    "length_tokens": len,
    "events": lambda response: (),
    "stop_reason": ResponseState.stop_reason,
    "window_versions": lambda response: response.window_versions,
    "routed_experts": ResponseState.routed_experts,
    "turn_rewards": lambda response: {},
    "turn_sampling": lambda response: {},
    "branch_index": lambda response: 0,
    "shared_prefix_tokens": lambda response: 0,
}


def reseeded(sampling: SamplingParams, mark: str) -> SamplingParams:
    """Returns these sampling parameters with another seed, which follows from theirs and ``mark``."""
    digest = hashlib.blake2b(f"{sampling.seed}{mark}".encode(), digest_size=8).digest()
    return replace(sampling, seed=int.from_bytes(digest, "big") >> 2)


def started(responses: tuple[ResponseState, ...]) -> tuple[ResponseState, ...]:
    """Returns the members of a group that have started, by its verdicts so far."""
    at_once = responses[0].prompt.at_once
    rewards = (response.reward.value for response in responses if response.reward is not None and response.reward.valid)
    late_has_begun = any(response.buffered_tokens or response.attempt for response in responses[at_once:])
    return responses[: members_started(len(responses), at_once, rewards, late_has_begun)]


def readers(step: int, reference_version: int, group_size: int) -> Mapping[str, Callable[[ResponseState], Any]]:
    """Returns a reader for each field of a trajectory. The given ``step`` takes the response, and ``group_size``
    members of its group are delivered.
    """
    return {
        **_READERS,
        "group_size": lambda _: group_size,
        "reference_version": lambda _: reference_version,
        "trained_step": lambda _: step,
        "staleness": lambda response: step - response.version,
    }
