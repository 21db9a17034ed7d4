"""The next turn of a session, as its caller asks for it.

request ──▶ TurnOrder.parse, or a refusal ──▶ event to the core, or its refusal ──▶ ResponseBuffer.give
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Final

from dora.config import Config
from dora.core import events as on
from dora.data.limits import SAMPLING_BYTES_MAX
from dora.data.sampling import check_sampling, checked_overrides
from dora.data.strict_json import read_json
from dora.data.types import Prompt, SamplingParams, SamplingValue
from dora.errors import MISSING, Conflict, InvalidValue
from dora.orchestrator.rollout.responses.span_checks import LOGPROB_BYTES
from dora.orchestrator.rollout.responses.state import ResponseState
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from dora.rpc.errors import LimitExceeded

NAME_MAX: Final = 128  # characters, of what gave tokens


@dataclass(frozen=True, slots=True)
class TurnLimits:
    """Holds a service's limits. ``vocab_size`` 0 means unknown. ``forks`` is per session; ``resolved`` returns the
    sampling parameters of a prompt's responses.
    """

    forks: int
    context_tokens: int
    message_bytes: int
    vocab_size: int
    resolved: Callable[[Prompt], SamplingParams]

    @classmethod
    def of(cls, config: Config, vocab_size: int, resolved: Callable[[Prompt], SamplingParams]) -> "TurnLimits":
        most = (config.sessions.forks, config.workers.context_tokens, config.service.max_message_bytes)
        return cls(*most, vocab_size, resolved)


@dataclass(frozen=True, slots=True)
class TurnOrder:
    """Holds the tokens that an environment gives, and how to sample after them. ``GivenRun`` describes the fields."""

    response: ResponseState
    token_ids: tuple[int, ...]
    max_tokens: int
    name: str
    after_turn: int
    first_token: int
    is_fork: bool
    sampling: Mapping[str, SamplingValue] = field(default_factory=dict)
    prompt_logprobs: bool = False

    @classmethod
    def parse(cls, request: pb.TurnRequest, response: ResponseState, limits: TurnLimits) -> "TurnOrder":
        """Returns the checked order. Raises InvalidValue, Conflict for a session without a prompt, and LimitExceeded
        for too many forks. The core refuses a session that is not idle.
        """
        if request.turn > len(response.inputs) + 1:
            raise InvalidValue("turn", request.turn, f"at most {len(response.inputs) + 1}, the next")
        check_line("name", request.name, NAME_MAX)
        after_turn, first_token, is_fork = _place(request, response, limits.forks)
        token_ids, max_tokens = _given(request, response, after_turn, first_token, limits)
        sampling = sampling_of(request, response, limits.resolved)
        if sampling or response.sampling.min_tokens:  # an engine would refuse a wrong one
            whole = replace(response.sampling, max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
            check_sampling(whole, vocab_size=limits.vocab_size)
        first_token = first_token if first_token >= 0 else -len(token_ids)
        place = (after_turn, first_token, is_fork)
        return cls(response, token_ids, max_tokens, request.name, *place, sampling, request.prompt_logprobs)

    @property
    def event(self) -> on.TurnRequested:
        is_prompt = self.first_token < 0
        follows = self.is_fork and not is_prompt
        return on.TurnRequested(
            self.response.request_id,
            len(self.token_ids),
            self.first_token if follows else on.NO_FORK,
            is_prompt,
            follows and self.response.is_on_path(self.after_turn, self.first_token),
        )


def _place(request: pb.TurnRequest, response: ResponseState, forks_most: int) -> tuple[int, int, bool]:
    """Returns the turn whose path the environment tokens continue, the position of the first one there (below 0: they
    are a prompt), and whether that is a fork.
    """
    last, has_prompt = len(response.inputs), bool(response.prompt.token_ids)
    is_prompt = request.fork == pb.TurnRequest.PROMPT
    turn = request.after_turn if request.HasField("after_turn") and not is_prompt else last
    if turn > last:
        raise InvalidValue("after_turn", turn, f"at most {last}, the last one")
    if not (turn or has_prompt or is_prompt):
        raise Conflict("fork", "none", "PROMPT: nothing precedes the turn", why="brings no prompt")
    tokens = response.path_tokens(turn)
    first = -1 if is_prompt else request.first_token if request.HasField("first_token") else tokens
    if first > tokens:
        raise InvalidValue("first_token", first, f"at most {tokens}, the response tokens after turn {turn}")
    is_fork, forks = (turn, first) != (last, tokens), sum(run.is_fork for run in response.inputs)
    if is_fork and forks >= forks_most + (not has_prompt):  # the first turn of a session without a prompt is none
        raise LimitExceeded("fork", forks + has_prompt, f"at most sessions.forks = {forks_most} a session")
    return turn, first, is_fork


def _given(
    request: pb.TurnRequest, response: ResponseState, after_turn: int, first_token: int, limits: TurnLimits
) -> tuple[tuple[int, ...], int]:
    """Returns the environment tokens and the limit of the sampled ones, checked against context and vocabulary."""
    prompt, before = 0 if first_token < 0 else len(response.prompt_ids(after_turn)), max(0, first_token)
    room = limits.context_tokens - prompt - before - 1  # one is sampled at least
    count = len(request.given_token_ids) // convert.TOKEN_ID_BYTES
    if not 1 <= count <= room:  # before anything is decoded
        allowed = f"1 to {room} tokens" if room > 0 else "none: the session has no room for another turn"
        allowed += f"; it has {prompt + before} of workers.max_model_len_tokens {limits.context_tokens}"
        raise InvalidValue("given_token_ids", f"{count} tokens" if count else MISSING, allowed)
    inputs = convert.token_ids_from_wire(request.given_token_ids, "given_token_ids")
    if limits.vocab_size and not 0 <= min(inputs) <= max(inputs) < limits.vocab_size:
        raise InvalidValue("given_token_ids", [min(inputs), max(inputs)], f"ids from 0 to {limits.vocab_size - 1}")
    most = room - count + 1
    max_tokens = request.max_tokens or min(most, response.sampling.max_tokens)
    if max_tokens > most:
        raise InvalidValue(
            "max_tokens",
            max_tokens,
            f"at most {most}, for which workers.max_model_len_tokens {limits.context_tokens} has room",
        )
    most_bytes = convert.trajectory_bytes_most(prompt, before + count + max_tokens, response.routing)
    if request.prompt_logprobs:  # a session's turn comes with its prompt, too
        most_bytes += LOGPROB_BYTES * (prompt + before + count)
    if most_bytes > limits.message_bytes:  # it could be generated but not delivered
        allowed = f"such that a trajectory fits into service.max_message_bytes {limits.message_bytes}"
        raise InvalidValue("given_token_ids", f"{count} tokens, {most_bytes} bytes in all", allowed)
    return inputs, max_tokens


def sampling_of(
    request: pb.TurnRequest, response: ResponseState, resolved: Callable[[Prompt], SamplingParams]
) -> dict[str, SamplingValue]:
    """Returns the turn's sampling parameters that differ from the session's, and a seed if the request has one. Raises
    InvalidValue.
    """
    said = read_json(request.sampling_json, "sampling_json", SAMPLING_BYTES_MAX) if request.sampling_json else {}
    overrides = checked_overrides(said, "sampling")
    if "max_tokens" in overrides:
        allowed = "given as max_tokens, beside sampling_json"
        raise InvalidValue("sampling.max_tokens", overrides["max_tokens"], allowed)
    own = {**response.prompt.sampling, **overrides}
    wanted = resolved(replace(response.prompt, sampling=own)) if overrides else response.sampling
    names = [each.name for each in fields(SamplingParams) if each.name not in ("seed", "max_tokens")]
    found = {name: getattr(wanted, name) for name in names if getattr(wanted, name) != getattr(response.sampling, name)}
    return {**found, **{name: overrides[name] for name in ("seed",) if name in overrides}}


def check_line(field: str, text: str, most: int, *, least: int = 0) -> None:
    """Raises InvalidValue for a text of another length, or that is not printable."""
    if not least <= len(text) <= most or not text.isprintable():
        raise InvalidValue(field, text[:80], f"{least} to {most} printable characters")
