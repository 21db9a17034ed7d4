"""The check of a turn that a caller asks for again: its reply may have been lost."""

from collections.abc import Callable

from dora.data.types import Prompt, SamplingParams
from dora.errors import MISSING, Conflict
from dora.orchestrator.rollout.responses.state import ResponseState
from dora.orchestrator.rollout.responses.turn_order import sampling_of
from dora.rpc import dora_pb2 as pb


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
    wanted, own = sampling_of(request, entry, resolved), run.sampling
    for name in sorted({*wanted, *own}):
        if wanted.get(name) != own.get(name):
            usual = MISSING if name == "seed" else getattr(entry.sampling, name)
            raise _other(f"sampling.{name}", wanted.get(name, usual), own.get(name, usual))


def _other(field: str, value: object, first: object) -> Conflict:
    """The refusal of a turn that is asked again in another way."""
    return Conflict(field, value, f"{first!r}, as in the turn's first call", why="differs")
