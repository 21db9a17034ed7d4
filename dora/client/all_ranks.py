"""Weights that are cut over the ranks of a trainer (FSDP2, DTensors), published by all of them together.

    on the rank that leads      await step.commit(weights=AllRanks(model))
    on every other one          AllRanks(model).take_part()

Tensor by tensor the ranks gather what each has; the leader writes it straight into the version's file, so that no rank
ever holds more than one whole tensor. torch is imported where it is used: whoever has such a model has loaded it.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from dora.client.modules import config_of, is_module, plain_name, state_of, unwrapped
from dora.errors import InvalidValue
from dora.models.checkpoint_names import to_checkpoint
from dora.weights.files import header_of, published_header
from dora.weights.reference import TensorHeader

_HEAD: Final = "lm_head.weight"
_EMBEDDING: Final = "model.embed_tokens.weight"


class AllRanks:
    """A module or a mapping of names to tensors, of which each rank has its part. The same on every rank."""

    def __init__(self, weights: Any, group: Any = None) -> None:
        """``group``: of torch.distributed, in which rank 0 leads; None: all ranks. Raises InvalidValue."""
        if is_module(weights):
            self._tensors, self._config = state_of(weights), config_of(unwrapped(weights))
        elif isinstance(weights, Mapping) and weights:
            self._tensors = {plain_name(name): tensor for name, tensor in weights.items()}
            self._config = {}
        else:
            allowed = "a torch module, or a mapping of names to tensors"
            raise InvalidValue("weights", type(weights).__name__, allowed)
        self._group = group

    def headers(self, wanted: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
        """How the whole tensors are published, by checkpoint name. Nothing is gathered."""
        import torch

        shapes = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in self._items()}
        found = self._named(shapes)
        if wanted and _HEAD not in wanted and _EMBEDDING in found:
            found.pop(_HEAD, None)  # a state_dict has a tied head twice
        return {
            name: published_header(header_of(name, tensor, shape_only=True), wanted.get(name))
            for name, tensor in found.items()
        }

    def take_part(self) -> None:
        """On a rank that does not lead: gives its parts, once for each commit of the leader's.

        Returns once all tensors are gathered. Raises InvalidValue where the leader has refused the weights.
        """
        if not self._told(go=None):
            raise InvalidValue("weights", "AllRanks", "accepted by the leading rank, whose error says why they are not")
        for _ in self._gathered():
            pass

    def refuse(self) -> None:
        """On the leader: tells the other ranks that it gathers nothing."""
        self._told(go=False)

    def gather(self, wanted: Mapping[str, TensorHeader]) -> Iterator[tuple[str, Any]]:
        """On the leader: the whole tensors by checkpoint name, each to be used before the next is asked for."""
        self._told(go=True)
        for name, tensor in self._gathered():
            for piece, part in self._named({name: tensor}).items():
                if not wanted or piece in wanted:
                    yield piece, part

    def _items(self) -> list[tuple[str, Any]]:
        return list(self._tensors.items())

    def _named(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        return to_checkpoint(tensors, self._config)

    def _gathered(self) -> Iterator[tuple[str, Any]]:
        for name, tensor in self._items():
            detached = tensor.detach()
            yield name, detached.full_tensor() if hasattr(detached, "full_tensor") else detached

    def _told(self, go: bool | None) -> bool:
        """What the leader says, at every rank; ``go`` is None where this one does not lead."""
        import torch
        import torch.distributed as dist

        if not dist.is_initialized():
            raise InvalidValue("weights", "AllRanks", "in a process of torch.distributed's group")
        leads = dist.get_rank(self._group) == 0
        if leads is (go is None):
            allowed = "committed by rank 0 of its group" if go is not None else "committed: rank 0 of its group leads"
            raise InvalidValue("weights", f"AllRanks at rank {dist.get_rank(self._group)}", allowed)
        device = next((each.device for _, each in self._items()), torch.device("cpu"))
        flag = torch.tensor([int(bool(go))], device=device)
        dist.broadcast(flag, group=self._group, group_src=0)
        return bool(flag.item())
