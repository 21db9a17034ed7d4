"""Modules as trainers have them: wrapped by torch.compile, DataParallel, DDP, FSDP1 or activation checkpointing.

Told by the names of their parts rather than by their types: torch is loaded by those who use it.
"""

from collections.abc import Mapping
from typing import Any, Final

_COMPILED: Final = "_orig_mod"  # torch._dynamo.OptimizedModule
_SHARDED: Final = "_fsdp_wrapped_module"  # torch.distributed.fsdp.FullyShardedDataParallel
_REPLICATED: Final = "module"  # DistributedDataParallel, DataParallel, AveragedModel: their only part
_TRANSPARENT: Final = (_COMPILED, _SHARDED, "_checkpoint_wrapped_module")  # never a part's name in a checkpoint


def is_module(value: object) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "named_parameters", None))


def unwrapped(module: Any) -> Any:
    """The model itself, with its ``config``; ``module`` where nothing wraps it."""
    while (inner := _inner(module)) is not None:
        module = inner
    return module


def is_sharded(module: Any) -> bool:
    """Whether FSDP1 has cut the parameters: only its own ``state_dict`` has them whole, and no forward pass of ours."""
    return any(_SHARDED in part._modules for part in module.modules())


def state_of(module: Any) -> dict[str, Any]:
    """The model's tensors by their names in it. Under FSDP1 every rank has to call it: the shards are gathered."""
    while not _is_shard(module) and (inner := _inner(module)) is not None:
        module = inner
    return {plain_name(name): tensor for name, tensor in module.state_dict().items()}


def plain_name(name: str) -> str:
    """A tensor's name without the parts that wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in _TRANSPARENT)


def renamed(tensors: Mapping[str, Any], wanted: Mapping[str, object]) -> dict[str, Any]:
    """``tensors``, as of a wrapped module's ``state_dict``, by the names that are wanted; others keep theirs."""
    found = {}
    for name, tensor in tensors.items():
        plain = plain_name(name)
        while plain not in wanted and plain.startswith(f"{_REPLICATED}."):
            plain = plain.removeprefix(f"{_REPLICATED}.")
        found[plain if name not in wanted and plain in wanted and plain not in tensors else name] = tensor
    return found


def _inner(module: Any) -> Any:
    parts = module._modules
    for name in (_COMPILED, _SHARDED):
        if name in parts:
            return parts[name]
    return parts[_REPLICATED] if set(parts) == {_REPLICATED} else None


def _is_shard(module: Any) -> bool:
    return _SHARDED in module._modules
