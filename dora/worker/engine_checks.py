"""What every engine refuses, and how: checks of one request against an engine's capability."""

import math
from collections.abc import Sequence
from typing import Final

from dora.errors import CanaryMismatch, Conflict, InvalidValue
from dora.types import Canary, EngineCapability, RequestSpec, SamplingParams

_SEED_MAX: Final = 2**63 - 1


def check_request(request: RequestSpec, capability: EngineCapability) -> None:
    """Raises InvalidValue for the first field that this engine cannot serve."""
    outputs, prompt = len(request.output_token_ids), len(request.prompt_token_ids)
    _check_tokens("prompt_token_ids", request.prompt_token_ids, capability.vocab_size)
    _check_tokens("output_token_ids", request.output_token_ids, capability.vocab_size)
    if prompt == 0:
        raise InvalidValue("prompt_token_ids", (), "at least one token")
    if len(request.logprobs) != outputs:
        raise InvalidValue("logprobs", f"{len(request.logprobs)} values", f"one an output token: {outputs}")
    limit = capability.max_model_len_tokens
    if prompt + outputs >= limit:
        raise InvalidValue(
            "prompt and output tokens", prompt + outputs, f"below the context of {limit}, which leaves room for one"
        )
    check_sampling(request.sampling)
    if outputs >= request.sampling.max_tokens:
        raise InvalidValue("output_token_ids", f"{outputs} tokens", f"below max_tokens = {request.sampling.max_tokens}")


def check_sampling(sampling: SamplingParams) -> None:
    """Raises InvalidValue for the first sampling parameter outside its domain."""
    checks = (
        ("temperature", 0 <= sampling.temperature < math.inf, "0 (greedy) or above"),
        ("top_p", 0 < sampling.top_p <= 1, "above 0, at most 1"),
        ("top_k", sampling.top_k >= 0, "0 (no limit) or above"),
        ("min_p", 0 <= sampling.min_p <= 1, "0 to 1"),
        ("seed", 0 <= sampling.seed <= _SEED_MAX, f"0 to {_SEED_MAX}"),
        ("max_tokens", sampling.max_tokens >= 1, "1 or above"),
        ("min_tokens", 0 <= sampling.min_tokens <= sampling.max_tokens, f"0 to max_tokens = {sampling.max_tokens}"),
        ("presence_penalty", -2 <= sampling.presence_penalty <= 2, "-2 to 2"),
        ("frequency_penalty", -2 <= sampling.frequency_penalty <= 2, "-2 to 2"),
        ("repetition_penalty", 0 < sampling.repetition_penalty <= 2, "above 0, at most 2"),
    )
    for name, valid, allowed in checks:
        if not valid:
            raise InvalidValue(f"sampling.{name}", getattr(sampling, name), allowed)


def check_version(request_version: int, loaded: int | None) -> None:
    """Raises Conflict unless a request is of the version that is loaded."""
    if request_version != loaded:
        raise Conflict("request.version", request_version, f"{loaded}, the version loaded")


def check_reproduced(version: int, found: Canary, expected: Canary, tolerance: float) -> None:
    """Raises CanaryMismatch where freshly loaded weights give other logprobs than were published with them."""
    difference = max_difference(found.logprobs, expected.logprobs)
    if not difference <= tolerance:
        raise CanaryMismatch(
            f"version {version}: logprobs differ from the canary by {difference:.3g}, allowed is {tolerance:g}"
        )


def max_difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """Largest absolute difference of two lists of logprobs of one length; NaN anywhere makes it infinite."""
    worst = 0.0
    for ours, theirs in zip(found, expected, strict=True):
        difference = abs(ours - theirs)
        worst = max(worst, math.inf if math.isnan(difference) else difference)
    return worst


def _check_tokens(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidValue(field, token_id, f"0 to {vocab_size - 1}")
