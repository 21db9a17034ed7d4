"""The routers of a mixture of experts, and those of their choices that rounding decides.

A router sends a token to the experts with the largest logits. If the last chosen expert and the first one not chosen
are closer than the difference of two correct implementations, either may be chosen, and everything after that differs
by far more than rounding. A comparison of two implementations' logprobs must account for these ties. Loads torch.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from dora.errors import InvalidValue
from dora.models.experts import experts_of

_NAMES = ("gate", "router")
_PAST = 1e-5  # how far a nudge moves a logit past the other


@dataclass(frozen=True, slots=True)
class Tie:
    """Two experts with nearly the same logit, one of which a router chose."""

    router: str  # the module's name
    token: int  # the token's position in the sequence
    margin: float  # difference of the two logits
    nudge: torch.Tensor  # float [hidden]; added to the router's input for this token, it selects the other expert


@contextmanager
def watched(module: torch.nn.Module, margin: float, turned: Sequence[Tie] = ()) -> Iterator[list[Tie]]:
    """Lists the ties within ``margin`` while ``module`` runs on one sequence, once.

    ``module`` is a causal language model with a transformers ``config``. The ties in ``turned`` are decided the other
    way, and not listed. Only linear routers that choose the largest logits are supported: other routers, and models
    whose config does not name the number of experts in a known way, have no ties here.
    """
    ties: list[Tie] = []
    with ExitStack() as hooks:
        for name, router, chosen in _routers(module):
            turn = {tie.token: tie.nudge for tie in turned if tie.router == name}
            hook = _hook(name, chosen, margin, turn, ties)
            hooks.callback(router.register_forward_pre_hook(hook).remove)
        yield ties


def has_routers(module: torch.nn.Module) -> bool:
    """Returns whether the module's ties can be detected."""
    return any(True for _ in _routers(module))


def _routers(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, int]]:
    experts, chosen = _experts(getattr(module, "config", None)) or (0, 0)
    if experts == chosen:
        return
    for name, part in module.named_modules():
        weight = getattr(part, "weight", None)
        named = name.rpartition(".")[2] in _NAMES
        if named and isinstance(weight, torch.Tensor) and weight.ndim == 2 and len(weight) == experts:
            yield name, part, chosen


def _experts(config: Any) -> tuple[int, int] | None:
    """Returns ``experts_of`` a module's config, and None also for a family whose fields are unknown."""
    fields = config.to_dict() if hasattr(config, "to_dict") else vars(config) if config is not None else {}
    try:
        return experts_of(fields, type(config).__name__)
    except InvalidValue:
        return None


def _hook(name: str, chosen: int, margin: float, turn: dict[int, torch.Tensor], ties: list[Tie]) -> Any:
    def look(router: Any, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden = arguments[0].reshape(-1, arguments[0].shape[-1]).clone()
        for token, nudge in turn.items():
            hidden[token] += nudge
        weight = router.weight.detach()
        logits = torch.nn.functional.linear(hidden.detach(), weight, getattr(router, "bias", None))
        largest, experts = logits.float().topk(chosen + 1)
        margins = largest[:, -2] - largest[:, -1]
        for token in (margins <= margin).nonzero()[:, 0].tolist():
            if token not in turn:
                apart = weight[experts[token, -1]] - weight[experts[token, -2]]
                between = float(margins[token])
                ties.append(Tie(name, token, between, (between + _PAST) * apart / (apart @ apart)))
        return hidden.reshape(arguments[0].shape), *arguments[1:]

    return look
