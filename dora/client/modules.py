"""Modules as trainers have them: wrapped by torch.compile, DataParallel, DDP, FSDP or activation checkpointing.

Wrappers are recognized by the names of their parts, not by their types, so that this module does not load torch.
"""

from collections.abc import Mapping
from typing import Any, Final

from dora.errors import InvalidValue
from dora.weights.reference import HEAD, TensorHeader, embedding_of_tied
from dora.weights.tied_head import differing_head

_COMPILED: Final = "_orig_mod"  # torch._dynamo.OptimizedModule
_SHARDED: Final = "_fsdp_wrapped_module"  # torch.distributed.fsdp.FullyShardedDataParallel
_REPLICATED: Final = "module"  # the only part of DistributedDataParallel, DataParallel, AveragedModel
_TRANSPARENT: Final = (_COMPILED, _SHARDED, "_checkpoint_wrapped_module")  # not in checkpoint names


def is_module(value: object) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "named_parameters", None))


def unwrapped(module: Any) -> Any:
    """Returns the model inside its wrappers, with its ``config``; ``module`` itself if there are none."""
    while (inner := _inner(module)) is not None:
        module = inner
    return module


def is_sharded(module: Any) -> bool:
    """Whether the parameters are sharded over ranks, by FSDP1 or as DTensors. A forward pass then needs all ranks."""
    return any(_SHARDED in part._modules for part in module.modules()) or any(map(_is_cut, module.parameters()))


def whole(tensor: Any, name: str) -> Any:
    """Returns the local tensor of a DTensor that is complete on this rank, and any other value unchanged.

    Raises InvalidValue for a DTensor that is sharded over several ranks: only all of them together could gather it.
    """
    if not hasattr(tensor, "full_tensor"):
        return tensor
    if _is_cut(tensor):
        allowed = (
            "a whole tensor: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, "
            "cpu_offload=True)) on every rank, and its result on the one that commits"
        )
        raise InvalidValue(f"weights: {name}", f"one rank's shard of a DTensor {tuple(tensor.shape)}", allowed)
    return tensor.to_local()


def state_of(module: Any) -> dict[str, Any]:
    """Returns the model's tensors by name. Under FSDP1 every rank must call it, because the shards are gathered."""
    while not _is_shard(module) and (inner := _inner(module)) is not None:
        module = inner
    return {plain_name(name): tensor for name, tensor in module.state_dict().items()}


def plain_name(name: str) -> str:
    """Removes the wrappers' parts from a tensor's name."""
    return ".".join(part for part in name.split(".") if part not in _TRANSPARENT)


def renamed(tensors: Mapping[str, Any], expected: Mapping[str, object]) -> dict[str, Any]:
    """Renames the ``tensors`` of a wrapped module's ``state_dict`` to the wanted names; others keep theirs."""
    found = {}
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise InvalidValue("weights: name of a tensor", name, "a text")
        plain = plain_name(name)
        while plain not in expected and plain.startswith(f"{_REPLICATED}."):
            plain = plain.removeprefix(f"{_REPLICATED}.")
        found[plain if name not in expected and plain in expected and plain not in tensors else name] = tensor
    return found


def without_tied_head(tensors: Mapping[str, Any], expected: Mapping[str, TensorHeader]) -> Mapping[str, Any]:
    """Returns ``tensors`` without a head that is tied to the embedding: a state_dict contains it twice. Raises
    InvalidValue if it differs from the embedding.
    """
    embedding = embedding_of_tied(expected)
    if embedding is None or HEAD not in tensors or embedding not in tensors:
        return tensors
    head, other = tensors[HEAD], tensors[embedding]
    if not share_storage(head, other):
        if not hasattr(head, "shape") or getattr(head, "device", None) != getattr(other, "device", None):
            return tensors  # of two kinds or places: the service compares what is published
        if head.shape != getattr(other, "shape", None) or not bool((head == other).all()):
            raise differing_head(embedding)
    return {name: tensor for name, tensor in tensors.items() if name != HEAD}


def share_storage(tensor: Any, other: Any) -> bool:
    """Returns whether two torch tensors, or their shards here, are one, as those of a tied head and its embedding."""
    local = [each.to_local() if hasattr(each, "full_tensor") else each for each in (tensor, other)]
    places = [
        (each.data_ptr(), each.device, each.shape, each.stride(), each.dtype)
        for each in local
        if getattr(each, "data_ptr", int)()
    ]
    return len(places) == 2 and places[0] == places[1]


def config_of(module: Any) -> dict[str, Any]:
    """Returns ``module.config``, a transformers configuration, a mapping, or an object, as a dict."""
    config = getattr(module, "config", None)
    if callable(to_dict := getattr(config, "to_dict", None)):
        config = to_dict()
    return dict(config) if isinstance(config, Mapping) else dict(getattr(config, "__dict__", {}))


def _inner(module: Any) -> Any:
    parts = module._modules
    for name in (_COMPILED, _SHARDED):
        if name in parts:
            return parts[name]
    return parts[_REPLICATED] if set(parts) == {_REPLICATED} else None


def _is_cut(tensor: Any) -> bool:
    if not hasattr(tensor, "full_tensor"):
        return False
    mesh, placements = tensor.device_mesh, tensor.placements
    return any(mesh.size(axis) > 1 and not each.is_replicate() for axis, each in enumerate(placements))


def _is_shard(module: Any) -> bool:
    return _SHARDED in module._modules
