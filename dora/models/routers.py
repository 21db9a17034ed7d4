"""The routers of a mixture of experts, and those of their choices that rounding decides.

A router sends a token to the experts of its largest logits. Where the last one taken and the first one left out are
closer than two correct implementations differ, either may be taken; and what follows then differs by far more than
rounding. Whoever compares the logprobs of two implementations has to know of these ties. Loads torch.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from dora.errors import InvalidValue
from dora.models.experts import experts_of

_NAMES = ("gate", "router")
_PAST = 1e-5  # how far a nudge carries a logit past the other


@dataclass(frozen=True, slots=True)
class Tie:
    """Two experts of nearly the same logit, of which a router took one."""

    router: str  # the module's name
    token: int  # whose experts they are; its place in the sequence
    margin: float  # between the two logits
    nudge: torch.Tensor  # float [hidden]; added to what the router sees of this token, it takes the other


@contextmanager
def watched(module: torch.nn.Module, margin: float, turned: Sequence[Tie] = ()) -> Iterator[list[Tie]]:
    """Lists the ties within ``margin`` of what ``module`` is run on: one sequence, once.

    ``module`` is a causal language model with a transformers ``config``. The choices in ``turned`` are made the other
    way, and not listed. Only routers that are linear and go by the largest logits are known: others have no ties here,
    as have models whose config does not say in a known way how many experts there are.
    """
    ties: list[Tie] = []
    with ExitStack() as hooks:
        for name, router, chosen in _routers(module):
            turn = {tie.token: tie.nudge for tie in turned if tie.router == name}
            hook = _hook(name, chosen, margin, turn, ties)
            hooks.callback(router.register_forward_pre_hook(hook).remove)
        yield ties


def has_routers(module: torch.nn.Module) -> bool:
    """Whether its ties can be known."""
    return any(True for _ in _routers(module))


def _routers(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, int]]:
    """Name and module of each, and how many experts it takes for a token."""
    experts, chosen = _experts(getattr(module, "config", None)) or (0, 0)
    if experts == chosen:
        return
    for name, part in module.named_modules():
        weight = getattr(part, "weight", None)
        named = name.rpartition(".")[2] in _NAMES
        if named and isinstance(weight, torch.Tensor) and weight.ndim == 2 and len(weight) == experts:
            yield name, part, chosen


def _experts(config: Any) -> tuple[int, int] | None:
    """``experts_of`` a module's config; None too where it is of a family whose fields are not known."""
    fields = config.to_dict() if hasattr(config, "to_dict") else vars(config) if config is not None else {}
    try:
        return experts_of(fields, type(config).__name__)
    except InvalidValue:
        return None


def _hook(name: str, chosen: int, margin: float, turn: dict[int, torch.Tensor], ties: list[Tie]) -> Any:
    def look(router: Any, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden = given[0].reshape(-1, given[0].shape[-1]).clone()
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
        return hidden.reshape(given[0].shape), *given[1:]

    return look
