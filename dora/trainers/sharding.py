"""A model sharded over several ranks by FSDP2: each has a part of every parameter, and of the optimiser's moments.

Source: torch.distributed.fsdp.fully_shard, per-parameter sharding with DTensors.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from dora.models.checkpoint_names import to_checkpoint
from dora.trainers.ranks import Ranks


def shard(module: Any) -> None:
    """Shards ``module``, a whole model that is equal on every rank, over all ranks: one unit per decoder layer."""
    for layer in module.get_decoder().layers:
        fully_shard(layer)
    fully_shard(module)


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the whole tensor, gathered from the ranks if it is sharded, in a collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_of(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a whole tensor that every rank has, with sharding, dtype and device of ``like``."""
    tensor = tensor.to(like.device, like.dtype)
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def gathered(tensors: Iterable[tuple[str, torch.Tensor]], ranks: Ranks) -> dict[str, torch.Tensor]:
    """Gathers whole copies into the leader's host memory, one by one. The others take part and get nothing."""
    found = {}
    for name, tensor in tensors:
        copy = whole_tensor(tensor.detach())
        if ranks.leads:
            found[name] = copy.cpu().clone()
    return found


def checkpoint_of(module: Any, ranks: Ranks) -> Mapping[str, torch.Tensor]:
    """Returns the model's whole tensors by their Hugging Face names, on the leader; see :func:`gathered`."""
    return to_checkpoint(gathered(module.state_dict().items(), ranks), module.config.to_dict())
