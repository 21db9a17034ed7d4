"""Checks of the next turn that a caller asks of a session. Each raises before anything has changed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

from dora.config import Config
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


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a fork's given tokens, as in ``GivenRun``; ``first_token`` below 0: they are a prompt."""

    after_turn: int
    first_token: int

    @property
    def is_prompt(self) -> bool:
        return self.first_token < 0


def place_of(entry: ResponseState, request: pb.TurnRequest, forks_most: int) -> Place | None:
    """Returns the place of the given tokens if the turn forks; None: they follow the last turn.

    Raises InvalidValue for an unknown place, Conflict for a session without a prompt, LimitExceeded for too many forks.
    """
    last, has_prompt = len(entry.given), bool(entry.prompt.token_ids)
    if request.fork == pb.TurnRequest.PROMPT:
        place = Place(last, -1)
    else:
        turn = request.after_turn if request.HasField("after_turn") else last
        if turn > last:
            raise InvalidValue("after_turn", turn, f"at most {last}, the last one")
        if not (turn or has_prompt):
            raise Conflict("fork", "none", "PROMPT: nothing precedes the turn", why="brings no prompt")
        tokens = entry.path_tokens(turn)
        first = request.first_token if request.HasField("first_token") else tokens
        if first > tokens:
            raise InvalidValue("first_token", first, f"at most {tokens}, the response tokens after turn {turn}")
        if (turn, first) == (last, tokens):
            return None
        place = Place(turn, first)
    forks = sum(run.is_fork for run in entry.given)
    if forks >= forks_most + (not has_prompt):  # the first turn of a session without a prompt is none
        raise LimitExceeded("fork", forks + has_prompt, f"at most sessions.forks = {forks_most} a session")
    return place


def sampling_of(
    entry: ResponseState, request: pb.TurnRequest, resolved: Callable[[Prompt], SamplingParams]
) -> dict[str, SamplingValue]:
    """Returns the turn's sampling parameters that differ from the session's, and a seed if the request has one.

    ``resolved``: returns the sampling parameters of a prompt's responses. Raises InvalidValue.
    """
    if not request.sampling_json:
        return {}
    said = read_json(request.sampling_json, "sampling_json", SAMPLING_BYTES_MAX)
    overrides = checked_overrides(said, "sampling")
    if "max_tokens" in overrides:
        allowed = "given as max_tokens, beside sampling_json"
        raise InvalidValue("sampling.max_tokens", overrides["max_tokens"], allowed)
    wanted = resolved(replace(entry.prompt, sampling={**entry.prompt.sampling, **overrides}))
    found: dict[str, SamplingValue] = {
        each.name: getattr(wanted, each.name)
        for each in fields(SamplingParams)
        if each.name not in ("seed", "max_tokens") and getattr(wanted, each.name) != getattr(entry.sampling, each.name)
    }
    return {**found, "seed": overrides["seed"]} if "seed" in overrides else found


def check_turn_sampling(
    entry: ResponseState, sampling: Mapping[str, SamplingValue], max_tokens: int, vocab_size: int
) -> None:
    """Raises InvalidValue for parameters that an engine would refuse."""
    if sampling or entry.sampling.min_tokens:
        whole = replace(entry.sampling, max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
        check_sampling(whole, vocab_size=vocab_size)


def given_of(
    entry: ResponseState, request: pb.TurnRequest, place: Place | None, config: Config, vocab_size: int
) -> tuple[tuple[int, ...], int]:
    """Returns the given tokens and the limit of the sampled ones, checked against context and vocabulary (0: unknown).

    Raises InvalidValue.
    """
    limit = config.workers.context_tokens
    prompt, before = len(entry.prompt_ids()), len(entry)
    if place is not None:
        prompt = 0 if place.is_prompt else len(entry.prompt_ids(place.after_turn))
        before = max(0, place.first_token)
    room = limit - prompt - before - 1  # one is sampled at least
    count = len(request.given_token_ids) // convert.TOKEN_ID_BYTES
    if not 1 <= count <= room:  # before anything is decoded
        allowed = f"1 to {room} tokens" if room > 0 else "none: the session has no room for another turn"
        allowed += f"; it has {limit - 1 - room} of workers.max_model_len_tokens {limit}"
        raise InvalidValue("given_token_ids", f"{count} tokens" if count else MISSING, allowed)
    given = convert.token_ids_from_wire(request.given_token_ids, "given_token_ids")
    if vocab_size and not 0 <= min(given) <= max(given) < vocab_size:
        raise InvalidValue("given_token_ids", [min(given), max(given)], f"ids from 0 to {vocab_size - 1}")
    most = room - count + 1
    max_tokens = request.max_tokens or min(most, entry.sampling.max_tokens)
    if max_tokens > most:
        allowed = f"at most {most}, for which workers.max_model_len_tokens {limit} has room"
        raise InvalidValue("max_tokens", max_tokens, allowed)
    most_bytes = convert.trajectory_bytes_most(prompt, before + count + max_tokens, entry.routing)
    if request.prompt_logprobs:  # a session's turn comes with its prompt, too
        most_bytes += LOGPROB_BYTES * (prompt + before + count)
    limit_bytes = config.service.max_message_bytes
    if most_bytes > limit_bytes:  # it could be generated but not delivered
        allowed = f"such that a trajectory fits into service.max_message_bytes {limit_bytes}"
        raise InvalidValue("given_token_ids", f"{count} tokens, {most_bytes} bytes in all", allowed)
    return given, max_tokens


def check_repeated(entry: ResponseState, request: pb.TurnRequest, resolved: Callable[[Prompt], SamplingParams]) -> None:
    """Raises Conflict if a turn is asked again with other tokens, at another place or with other sampling.

    ``resolved``: as of ``sampling_of``. Raises InvalidValue.
    """
    run = entry.given[request.turn - 1]
    is_same = entry.held()["token_id"][run.held_at : run.held_end].tobytes() == request.given_token_ids
    is_same &= run.is_prompt == (request.fork == pb.TurnRequest.PROMPT)
    for name in ("after_turn", "first_token") if not run.is_prompt else ():
        is_same &= not request.HasField(name) or getattr(request, name) == getattr(run, name)
    if not is_same:
        raise Conflict("given_token_ids", f"{run.tokens} tokens", "those of its first call", why="differ")
    if request.max_tokens not in (0, run.max_tokens):
        raise _other("max_tokens", request.max_tokens, run.max_tokens)
    if request.prompt_logprobs and not (run.prompt_logprobs and request.turn == len(entry.given)):
        allowed = "false: they were not asked for in the turn's first call, or a later turn was asked"
        raise Conflict("prompt_logprobs", True, allowed, why="are not kept")
    wanted, own = sampling_of(entry, request, resolved), run.sampling
    for name in sorted({*wanted, *own}):
        if wanted.get(name) != own.get(name):
            usual = MISSING if name == "seed" else getattr(entry.sampling, name)
            raise _other(f"sampling.{name}", wanted.get(name, usual), own.get(name, usual))


def _other(field: str, value: object, first: object) -> Conflict:
    """The refusal of a turn that is asked again in another way."""
    return Conflict(field, value, f"{first!r}, as in the turn's first call", why="differs")


def check_line(field: str, text: str, most: int, *, least: int = 0, lines: bool = False) -> None:
    """Raises InvalidValue for a text of another length, or that is not printable. ``lines``: it may have several."""
    if not least <= len(text) <= most or not (lines or text.isprintable()):
        raise InvalidValue(field, text[:80], f"{least} to {most} printable characters")
