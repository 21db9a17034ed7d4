"""The check of a turn that a caller asks for again: its reply may have been lost."""

from collections.abc import Callable

from dora.data.types import Prompt, SamplingParams
from dora.errors import MISSING, Conflict
from dora.orchestrator.rollout.responses.state import ResponseState
from dora.orchestrator.rollout.responses.turn_order import sampling_of
from dora.rpc import dora_pb2 as pb


def check_repeated(
    response: ResponseState, request: pb.TurnRequest, resolved: Callable[[Prompt], SamplingParams]
) -> None:
    """Raises Conflict if a turn is requested again with other tokens, at another place or with other sampling.

    ``sampling_of`` gets ``resolved``. Raises InvalidValue.
    """
    run = response.inputs[request.turn - 1]
    is_same = response.buffered()["token_id"][run.buffer_begin : run.buffer_end].tobytes() == request.given_token_ids
    is_same &= run.is_prompt == (request.fork == pb.TurnRequest.PROMPT)
    for name in ("after_turn", "first_token") if not run.is_prompt else ():
        is_same &= not request.HasField(name) or getattr(request, name) == getattr(run, name)
    if not is_same:
        raise Conflict("given_token_ids", f"{run.tokens} tokens", "those of its first call", why="differ")
    if request.max_tokens not in (0, run.max_tokens):
        raise _other("max_tokens", request.max_tokens, run.max_tokens)
    if request.prompt_logprobs and not (run.prompt_logprobs and request.turn == len(response.inputs)):
        allowed = "false: they were not asked for in the turn's first call, or a later turn was requested"
        raise Conflict("prompt_logprobs", True, allowed, why="are not kept")
    requested, own = sampling_of(request, response, resolved), run.sampling
    for name in sorted({*requested, *own}):
        if requested.get(name) != own.get(name):
            usual = MISSING if name == "seed" else getattr(response.sampling, name)
            raise _other(f"sampling.{name}", requested.get(name, usual), own.get(name, usual))


def _other(field: str, value: object, first: object) -> Conflict:
    return Conflict(field, value, f"{first!r}, as in the turn's first call", why="differs")
