"""Router replay (R3): the trainer sends tokens to the experts to which the engine sent them, as recorded.

The chosen experts are those of the record, and their weights come from the trainer's own logits. The gradient therefore
flows through the router, while a choice that was rounded differently does not change a token's path. Tokens without a
recorded row (padding, a record without rows) keep the trainer's own choice.

Source: Ma et al.: *Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers*, section 3.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from dora.data.trajectory import Trajectory
from dora.data.types import RoutingShape
from dora.errors import Conflict, InvalidValue

OWN: Final = -1  # in place of an expert: keeps the trainer's own choice
_PROBED_TOKENS: Final = 8


def replay(
    logits: torch.Tensor, routed: torch.Tensor, own: torch.Tensor, *, renormalise: bool = False, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (weights, indices), both (tokens, top_k): the experts of each token, and their weights in float32.

    ``logits`` (tokens, experts) are the trainer's own; the weights carry their gradient. ``routed`` (tokens, top_k) has
    the recorded experts; a row of ``OWN`` keeps the trainer's own choice ``own`` (tokens, top_k). A weight is ``scale``
    times the softmax over all experts, divided by the sum over the chosen ones if ``renormalise``.
    """
    indices = choice(routed, own)
    weights = logits.softmax(dim=-1, dtype=torch.float32).gather(-1, indices)
    if renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights * scale, indices


def choice(routed: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """The recorded experts, or ``own`` for rows without them; as in :func:`replay`."""
    return torch.where(routed == OWN, own, routed.to(own.device, own.dtype))


def check_routing(trajectory: Trajectory, shape: RoutingShape) -> None:
    """``shape`` is of the trainer's model, and counts the layers whose routers can be replayed.

    Raises Conflict if the trajectory's rows are of another model, InvalidValue if they name experts that do not exist.
    """
    rows = trajectory.routed_experts
    if rows is None:
        return
    name = f"trajectory {trajectory.trajectory_id}: routed_experts"
    if rows.shape[1:] != (shape.layers, shape.top_k):
        allowed = f"{shape.layers} layers of {shape.top_k}, the routers that can be replayed; or disable router replay"
        found = f"{rows.shape[1]} layers of {rows.shape[2]}"
        raise Conflict(name, found, allowed, "do not fit the trainer's model")
    if rows.size and rows.max() >= shape.experts:
        raise InvalidValue(name, int(rows.max()), f"0 to {shape.experts - 1}, the experts of a layer")


def shared_prompt(trajectory: Trajectory) -> tuple[str, bytes]:
    """Returns a key that is equal for responses that can share one reading of their prompt: those of a group with the
    same prompt, which environments may have given, and the same experts.

    Samples of a group may have read their prompt on different workers.
    """
    rows = trajectory.routed_experts
    prompt = trajectory.prompt_token_ids
    return trajectory.group_id, prompt.tobytes() + (b"" if rows is None else rows[: len(prompt)].tobytes())


def rows_of(trajectories: Sequence[Trajectory]) -> list[npt.NDArray[np.int32]] | None:
    """Returns (prompt tokens + n, layers, top_k) for each trajectory: the experts of the token at each position, or
    ``OWN``.

    The response's last token has none, as it was never an input of the engine; nor have environment tokens after which
    a session was broken off. None if no trajectory has any.
    """
    shape = next((each.routed_experts.shape[1:] for each in trajectories if each.routed_experts is not None), None)
    if shape is None:
        return None
    found = []
    for each in trajectories:
        rows = np.full((len(each.prompt_token_ids) + each.length_tokens, *shape), OWN, np.int32)
        if each.routed_experts is not None:
            rows[: len(each.routed_experts)] = each.routed_experts
        found.append(rows)
    return found


@dataclass(frozen=True, slots=True)
class Router:
    """The weights that one layer gives its experts, for :func:`replay`."""

    module: Any
    experts: int
    top_k: int
    renormalise: bool
    scale: float


class RouterReplay:
    """The routers of one model of transformers, replayed within :meth:`sending` and unchanged outside."""

    def __init__(self, module: Any) -> None:
        """Must be called before ``module`` is sharded: it probes how each router weighs experts."""
        self._routers = [found for each in module.modules() if (found := _router(each)) is not None]
        self._routed: torch.Tensor | None = None
        for layer, router in enumerate(self._routers):
            router.module.register_forward_hook(self._hook(layer, router))

    def check(self, trajectory: Trajectory) -> None:
        """Raises as :func:`check_routing`."""
        top_k = min((router.top_k for router in self._routers), default=0)
        experts = min((router.experts for router in self._routers), default=0)
        check_routing(trajectory, RoutingShape(len(self._routers), top_k, experts))

    @contextmanager
    def sending(self, routed: torch.Tensor | None) -> Iterator[None]:
        """Prepares one forward pass: ``routed`` (tokens, layers, top_k) has a row for each token, in order.

        If it is None, the routers choose for all tokens. With gradient checkpointing, the context must include the
        backward pass, which recomputes activations.
        """
        self._routed = routed
        try:
            yield
        finally:
            self._routed = None

    def _hook(self, layer: int, router: Router) -> Callable[..., Any]:
        def led(_module: Any, _inputs: Any, output: Any) -> Any:
            if self._routed is None:
                return None
            logits, weights, own = output
            self._routed = self._routed.to(logits.device)
            if len(self._routed) != len(logits):
                raise InvalidValue("routed: rows", len(self._routed), f"{len(logits)}, one for each token of the pass")
            found, indices = replay(
                logits, self._routed[:, layer], own, renormalise=router.renormalise, scale=router.scale
            )
            return logits, found.to(weights.dtype), indices

        return led


def _router(module: Any) -> Router | None:
    """Probes how ``module`` weighs experts. Returns None if it is not a router of a known kind.

    A router of transformers returns ``(logits, weights, indices)``. The probe uses logits of at most 1, so that the
    chosen experts do not have all the weight and renormalisation is visible.
    """
    top_k, weight = getattr(module, "top_k", None), getattr(module, "weight", None)
    if not isinstance(top_k, int) or not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        return None
    experts, hidden = weight.shape
    states = torch.sin(torch.arange(_PROBED_TOKENS * hidden, dtype=torch.float32)).view(-1, hidden).to(weight)
    with torch.no_grad():
        states = states / (states @ weight.T).abs().max().clamp(min=1e-6)
        output = module(states)
        if not isinstance(output, tuple) or [tuple(each.shape) for each in output] != [
            (_PROBED_TOKENS, experts),
            (_PROBED_TOKENS, top_k),
            (_PROBED_TOKENS, top_k),
        ]:
            return None
        logits, weights, own = output
        tolerance = 1e-4 if min(torch.finfo(each.dtype).bits for each in (logits, weights)) >= 32 else 1e-2
        for renormalise in (False, True):
            for scale in (1.0, float(getattr(module, "routed_scaling_factor", 1.0))):
                found, _ = replay(logits, own, own, renormalise=renormalise, scale=scale)
                if torch.allclose(found, weights.float(), rtol=tolerance, atol=0.0):
                    return Router(module, experts, top_k, renormalise, scale)
    return None
