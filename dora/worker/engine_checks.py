"""What every engine refuses, and how: checks of one request against an engine's capability."""

import math
from collections.abc import Sequence

from dora.errors import CanaryMismatch, Conflict, InvalidValue
from dora.sampling import check_sampling
from dora.types import Canary, EngineCapability, RequestSpec
from dora.weights.canary import LOGPROB_MOST


def check_request(request: RequestSpec, capability: EngineCapability, known: RequestSpec | None = None) -> None:
    """Raises InvalidValue for the first field that this engine cannot serve.

    ``known``: the same request with fewer outputs, which was checked.
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
    limit = capability.max_model_len_tokens
    if prompt + outputs >= limit:
        raise InvalidValue(
            "prompt and output tokens", prompt + outputs, f"below the context of {limit}, which leaves room for one"
        )
    check_sampling(request.sampling, vocab_size=capability.vocab_size)
    if outputs >= request.sampling.max_tokens:
        raise InvalidValue("output_token_ids", f"{outputs} tokens", f"below max_tokens = {request.sampling.max_tokens}")


def check_version(request_version: int, loaded: int | None) -> None:
    """Raises Conflict unless a request is of the version that is loaded."""
    if request_version != loaded:
        raise Conflict("request.version", request_version, f"{loaded}, the version loaded", why="is not loaded")


def check_reproduced(version: int, found: Canary, expected: Canary, tolerance: float) -> None:
    """Raises CanaryMismatch where freshly loaded weights give other logprobs than were published with them."""
    difference = max_difference(found.logprobs, expected.logprobs)
    if not difference <= tolerance:
        raise CanaryMismatch(
            f"version {version}: logprobs differ from the canary by {difference:.3g}, allowed is {tolerance:g}",
            difference,
        )


def check_finite(version: int, found: Canary) -> None:
    """Raises CanaryMismatch where loaded weights give logprobs that are none, whether a canary was published or not."""
    wrong = next((each for each in found.logprobs if not -math.inf < each <= LOGPROB_MOST), None)
    if wrong is not None:
        raise CanaryMismatch(f"version {version}: a logprob of the canary is {wrong:g}", math.inf)


def max_difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """Largest absolute difference of two lists of logprobs of one length; NaN anywhere makes it infinite."""
    worst = 0.0
    for ours, theirs in zip(found, expected, strict=True):
        difference = abs(ours - theirs)
        worst = max(worst, math.inf if math.isnan(difference) else difference)
    return worst


def _check_tokens(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    for token_id in (min(token_ids), max(token_ids)) if token_ids else ():
        if not 0 <= token_id < vocab_size:
            raise InvalidValue(field, token_id, f"0 to {vocab_size - 1}")
