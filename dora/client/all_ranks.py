"""Publishes weights that are sharded over the ranks of a trainer (FSDP2, DTensors).

    on the leading rank         await step.commit(weights=AllRanks(model))
    on every other rank         AllRanks(model).take_part()

All ranks gather one tensor at a time, and the leader writes it straight into the version's file. No rank ever holds
more than one whole tensor. torch is imported on use: a process with such a model has loaded it already.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from dora.client.modules import config_of, is_module, plain_name, share_storage, state_of, unwrapped
from dora.errors import InvalidValue
from dora.models.checkpoint_names import to_checkpoint
from dora.weights.files import header_of, published_header
from dora.weights.reference import HEAD, TensorHeader, embedding_of_tied


class AllRanks:
    """A module, or a mapping of names to tensors, sharded over the ranks. The same on every rank."""

    def __init__(self, weights: Any, group: Any = None) -> None:
        """``group`` is a torch.distributed group, led by its rank 0, or None for all ranks. Raises InvalidValue."""
        if is_module(weights):
            self._tensors = state_of(weights)
            self._config = {**config_of(unwrapped(weights)), "tie_word_embeddings": False}  # as ``headers`` decides
        elif isinstance(weights, Mapping) and weights:
            self._tensors = {plain_name(name): tensor for name, tensor in weights.items()}
            self._config = {}
        else:
            allowed = "a torch module, or a mapping of names to tensors"
            raise InvalidValue("weights", type(weights).__name__, allowed)
        self._group = group

    def headers(self, expected: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
        """The headers of the whole tensors as published, by checkpoint name. Gathers nothing."""
        import torch

        shapes = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in self._items()}
        found = self._named(shapes)
        embedding = embedding_of_tied(expected or found)
        if HEAD in found and embedding in found and share_storage(self._tensors[HEAD], self._tensors[embedding]):
            del found[HEAD]  # a state_dict contains a tied head twice; of another one, the service compares the numbers
        return {
            name: published_header(header_of(name, tensor, shape_only=True), expected.get(name))
            for name, tensor in found.items()
        }

    def take_part(self) -> None:
        """Contributes this rank's shards, once for each commit of the leader. For all ranks but the leader.

        Returns once all tensors are gathered. Raises InvalidValue if the leader has refused the weights.
        """
        if not self._told(go=None):
            raise InvalidValue("weights", "AllRanks", "accepted by the leading rank, whose error gives the reason")
        for _ in self._gathered():
            pass

    def refuse(self) -> None:
        """Notifies the other ranks, from the leader, that nothing will be gathered."""
        self._told(go=False)

    def gather(self, expected: Mapping[str, TensorHeader]) -> Iterator[tuple[str, Any]]:
        """Yields the whole tensors by checkpoint name, on the leader. Use each before the next is requested."""
        self._told(go=True)
        for name, tensor in self._gathered():
            for piece, part in self._named({name: tensor}).items():
                if not expected or piece in expected:
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
        import torch
        import torch.distributed as dist

        if not dist.is_initialized():
            raise InvalidValue("weights", "AllRanks", "in a process of the torch.distributed group")
        leads = dist.get_rank(self._group) == 0
        if leads is (go is None):
            allowed = "committed by rank 0 of its group" if go is not None else "committed by rank 0, which this is"
            raise InvalidValue("weights", f"AllRanks at rank {dist.get_rank(self._group)}", allowed)
        device = next((each.device for _, each in self._items()), torch.device("cpu"))
        flag = torch.tensor([int(bool(go))], device=device)
        dist.broadcast(flag, group=self._group, group_src=0)
        return bool(flag.item())
