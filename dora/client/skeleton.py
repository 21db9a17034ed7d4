"""A module's structure without its weights, to compute the canary of copied weights while training continues.

The trainer's own module cannot be used: its next step changes the weights, in another thread.
"""

import copy
from collections.abc import Mapping
from typing import Any, Final, Self

from dora.client.modules import is_module, is_sharded, plain_name, unwrapped
from dora.client.taking import Taken
from dora.data.types import Canary
from dora.models.checkpoint_names import to_checkpoint
from dora.weights.canary import compute_canary
from dora.weights.files import tensor_at
from dora.weights.reference import HEAD, embedding_of_tied, layout_of

_COMPILED: Final = "_orig_mod"


class Skeleton:
    def __init__(self, module: Any, bare: Any, config: Mapping[str, Any]) -> None:
        self.module = module  # the original
        self._bare, self._config = bare, config

    @classmethod
    def of(cls, weights: object, config: Mapping[str, Any]) -> Self | None:
        """Returns None if unsupported: no module, sharded, compiled, not in host memory, or not copyable.

        On another device the copy would need room for a second model, and the pass takes only milliseconds.
        """
        if not is_module(weights) or is_sharded(weights):
            return None
        import torch

        module: Any = unwrapped(weights)
        if any(parameter.device.type != "cpu" for parameter in module.parameters()):
            return None
        if any(_COMPILED in part._modules for part in module.modules()):
            return None  # running it uncompiled is a setting of the whole process
        memo: dict[int, Any] = {
            id(parameter): torch.nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
            for parameter in module.parameters()
        }
        try:
            return cls(module, copy.deepcopy(module, memo), {**config, "tie_word_embeddings": False})
        except Exception:  # user modules may hold anything: a lock, a stream, a tensor with a gradient
            return None

    def canary(self, taken: Taken) -> Canary:
        """Computes the canary of the copied weights."""
        import torch

        stored, headers = {}, {}
        for content in taken.mapped().values():
            offset, tensors = layout_of(content)
            for header in tensors:
                headers[header.name], stored[header.name] = header, tensor_at(content, offset, header)
                offset += header.content_bytes
        if (embedding := embedding_of_tied(headers)) is not None:
            stored[HEAD] = stored[embedding]  # a parameter of its own, left out as it is equal
        parameters = {}
        for name, parameter in self._bare.named_parameters():
            plain = plain_name(name)
            pieces = to_checkpoint({plain: parameter}, self._config)
            found = [stored[piece] for piece in pieces]
            if len(found) == 1 and found[0].shape == parameter.shape:
                parameters[name] = found[0].to(parameter.dtype)
                continue
            whole = torch.empty(parameter.shape, dtype=parameter.dtype)
            for piece, place in to_checkpoint({plain: whole}, self._config).items():
                place.copy_(stored[piece])
            parameters[name] = whole
        return compute_canary(self._bare, parameters=parameters)
