"""The canary: a fixed token sequence whose logprobs the trainer publishes with the weights.

Every worker must reproduce them after loading. This detects a silently corrupted update (a head of the old version,
experts that were not re-packed) before the worker samples a token.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

from dora.data.types import Canary
from dora.errors import InvalidValue

if TYPE_CHECKING:
    import torch

CANARY_TOKENS: Final = 48
_CHOICES: Final = 8  # sequences tried to find one without ties
LOGPROB_MAX: Final = 1e-4  # rounding may leave a certain token's logprob just above zero
TIE: Final = 1e-4  # router logits this close are tied: rounding decides which expert is chosen
_LOSSY: Final = {"BF16": "bfloat16", "F16": "float16"}


def canary_token_ids(vocab_size: int, tokens: int = CANARY_TOKENS, choice: int = 0) -> tuple[int, ...]:
    """Returns a fixed sequence, chosen by ``choice``, over the vocabulary. Raises InvalidValue if that is below 2."""
    if vocab_size < 2:
        raise InvalidValue("vocab_size", vocab_size, "2 or more")
    first = choice * tokens
    return tuple((7919 * i * i + 104729 * i + 13) % vocab_size for i in range(first, first + tokens))


def check_canary(canary: Canary, vocab_size: int) -> None:
    """Raises InvalidValue if a token id is outside the vocabulary or a logprob is not a finite number <= 0."""
    for token_id in canary.token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidValue("canary.token_ids", token_id, f"0 to {vocab_size - 1}")
    if len(canary.logprobs) != len(canary.token_ids) - 1:
        raise InvalidValue("canary.logprobs", len(canary.logprobs), f"{len(canary.token_ids) - 1}, one a transition")
    for logprob in canary.logprobs:
        if not (math.isfinite(logprob) and logprob <= LOGPROB_MAX):
            raise InvalidValue("canary.logprobs", logprob, "finite and not above 0: are the weights finite?")


def compute_canary(
    module: "torch.nn.Module",
    dtypes: Mapping[str, str] | None = None,
    parameters: "Mapping[str, torch.Tensor] | None" = None,
) -> Canary:
    """Computes the canary of a causal language model with a transformers ``config``.

    ``dtypes`` has the safetensors dtype of each parameter that loses precision when published; the canary is computed
    from the weights as published. ``parameters`` replace the module's own. For a mixture of experts, the canary uses
    the first of several sequences without router ties, or the one with the fewest: at a tie a worker may correctly
    choose another expert. Train/eval state, gradients and random state are left untouched. Raises InvalidValue if the
    module has no ``config.vocab_size``.
    """
    import torch

    from dora.models.routers import watched

    config: Any = getattr(module, "config", None)
    vocab_size = getattr(config, "vocab_size", None)
    if vocab_size is None:
        raise InvalidValue("weights", type(module).__name__, "a module with config.vocab_size, or pass a canary")
    training = [(part, part.training) for part in module.modules()]
    module.eval()  # dropout would make it random
    compiled = any("_orig_mod" in part._modules for part in module.modules())
    eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()  # runs once: not worth compiling
    try:
        with torch.no_grad(), eager:
            rounded = dict(parameters) if parameters is not None else _rounded(module, dtypes or {})

            def run(token_ids: tuple[int, ...]) -> tuple[Canary, int]:
                with watched(module, TIE) as ties:
                    return _of_sequence(module, rounded, token_ids), len(ties)

            return least_tied(run, int(vocab_size), int(getattr(config, "max_position_embeddings", CANARY_TOKENS)))
    finally:
        for part, was_training in training:
            part.training = was_training


def least_tied(run: Callable[[tuple[int, ...]], tuple[Canary, int]], vocab_size: int, tokens_max: int) -> Canary:
    """The canary of the first sequence without router ties, or of the one with the fewest.

    ``run`` returns a sequence's canary and its number of router logits tied within ``TIE``.
    """
    found: list[tuple[Canary, int]] = []
    for choice in range(_CHOICES):
        found.append(run(canary_token_ids(vocab_size, min(CANARY_TOKENS, tokens_max), choice)))
        if not found[-1][1]:
            break
    return min(found, key=lambda each: each[1])[0]


def _of_sequence(
    module: "torch.nn.Module", parameters: dict[str, "torch.Tensor"], token_ids: tuple[int, ...]
) -> Canary:
    import torch

    device = next(iter(parameters.values()), next(module.parameters())).device
    batch = torch.tensor([token_ids], dtype=torch.int64, device=device)
    arguments = {"input_ids": batch, "use_cache": False}
    output = torch.func.functional_call(module, parameters, (), arguments)
    logprobs = torch.log_softmax(output.logits[0, :-1].float(), dim=-1)
    return Canary(token_ids, tuple(logprobs.gather(1, batch[0, 1:, None])[:, 0].cpu().tolist()))


def _rounded(module: "torch.nn.Module", dtypes: Mapping[str, str]) -> dict[str, "torch.Tensor"]:
    import torch

    changed = {}
    for name, parameter in module.named_parameters():
        target = _LOSSY.get(dtypes.get(name, ""))
        if target is not None and parameter.dtype != getattr(torch, target) and parameter.dtype.is_floating_point:
            changed[name] = parameter.to(getattr(torch, target)).to(parameter.dtype)
    return changed
