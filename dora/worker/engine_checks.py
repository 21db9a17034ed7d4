"""Checks of one request against an engine's capability, shared by all engines."""

import math
from collections.abc import Sequence

from dora.data.sampling import check_sampling
from dora.data.types import Canary, EngineCapability, RequestSpec, SamplingParams
from dora.errors import CanaryMismatch, Conflict, InvalidValue
from dora.weights.canary import LOGPROB_MAX


def check_request(request: RequestSpec, capability: EngineCapability, known: RequestSpec | None = None) -> None:
    """Raises InvalidValue for the first field that this engine cannot serve.

    ``known`` is the same request with fewer outputs, already checked.
    """
    outputs, prompt = len(request.output_token_ids), len(request.prompt_token_ids)
    if known is None:
        _check_tokens("prompt_token_ids", request.prompt_token_ids, capability.vocab_size)
    checked = 0 if known is None else len(known.output_token_ids)
    _check_tokens("output_token_ids", request.output_token_ids[checked:], capability.vocab_size)
    if prompt == 0:
        raise InvalidValue("prompt_token_ids", (), "at least one token")
    if len(request.logprobs) != outputs:
        raise InvalidValue("logprobs", f"{len(request.logprobs)} values", f"one an output token: {outputs}")
    _check_inputs(request)
    limit = capability.max_model_len_tokens
    if prompt + outputs >= limit + request.kept:  # the turn of a kept request may have ended at the context
        raise InvalidValue(
            "prompt and output tokens", prompt + outputs, f"below the context of {limit}, which leaves room for one"
        )
    check_sampling(request.sampling, vocab_size=capability.vocab_size)
    sampled = outputs - request.turn_begin
    if sampled >= request.sampling.max_tokens + request.kept:
        raise InvalidValue("output_token_ids", f"{sampled} tokens", f"below max_tokens = {request.sampling.max_tokens}")


def check_extension(
    request: RequestSpec,
    given_token_ids: Sequence[int],
    sampling: SamplingParams,
    capability: EngineCapability,
    after: int,
) -> None:
    """Raises InvalidValue unless a kept request can be extended by these tokens, after its first ``after`` outputs."""
    if not 0 <= after <= len(request.output_token_ids):
        raise InvalidValue("after", after, f"0 to {len(request.output_token_ids)}, its outputs")
    left = capability.max_model_len_tokens - 1 - len(request.prompt_token_ids) - after
    if not 1 <= len(given_token_ids) <= left:
        allowed = (
            f"1 to {left} tokens, which leaves room for one in the context" if left > 0 else "none: the context is full"
        )
        raise InvalidValue("given_token_ids", f"{len(given_token_ids)} tokens", allowed)
    _check_tokens("given_token_ids", given_token_ids, capability.vocab_size)
    check_sampling(sampling, vocab_size=capability.vocab_size)


def check_version(request_version: int, loaded: int | None) -> None:
    """Raises Conflict unless the request has the loaded version."""
    if request_version != loaded:
        raise Conflict("request.version", request_version, f"{loaded}, the version loaded", why="is not loaded")


def check_finite(version: int, found: Canary) -> None:
    """Raises CanaryMismatch if loaded weights give logprobs that are not finite, with or without a published canary."""
    wrong = next((each for each in found.logprobs if not -math.inf < each <= LOGPROB_MAX), None)
    if wrong is not None:
        raise CanaryMismatch(f"version {version}: a logprob of the canary is {wrong:g}", math.inf)


def _check_inputs(request: RequestSpec) -> None:
    """Raises InvalidValue unless input runs alternate with sampled tokens, as every turn samples at least one. A fork's
    may be the first tokens.
    """
    end = -1
    for first, after in request.inputs:
        if not end < first < after <= len(request.output_token_ids):
            allowed = f"runs with sampled tokens before each, within {len(request.output_token_ids)} output tokens"
            raise InvalidValue("given", (first, after), allowed)
        end = after
    if request.kept and (not request.keeps or request.turn_begin == len(request.output_token_ids)):
        raise InvalidValue("kept", True, "false, for a request without keeps, or whose turn has no sampled token")


def _check_tokens(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    for token_id in (min(token_ids), max(token_ids)) if token_ids else ():
        if not 0 <= token_id < vocab_size:
            raise InvalidValue(field, token_id, f"0 to {vocab_size - 1}")
