"""Converts a live transformers module's tensors to the names and shapes of its Hugging Face checkpoint.

transformers >= 5 holds all experts of a layer in two fused tensors; checkpoints, and the engines that read them, have
one tensor per expert and projection. With ``E`` experts, intermediate size ``I`` and hidden size ``H``:

    experts.gate_up_proj  (E, 2 I, H)  ->  experts.<e>.gate_proj.weight (I, H), experts.<e>.up_proj.weight (I, H)
    experts.down_proj     (E, H, I)    ->  experts.<e>.down_proj.weight (H, I)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dora.errors import InvalidValue

if TYPE_CHECKING:
    from torch import Tensor

# model_type of config.json -> checkpoint names of (gate, up, down). Source: the models' public checkpoints.
_EXPERT_NAMES = {
    "qwen2_moe": ("gate_proj", "up_proj", "down_proj"),
    "qwen3_moe": ("gate_proj", "up_proj", "down_proj"),
    "qwen3_next": ("gate_proj", "up_proj", "down_proj"),
    "deepseek_v2": ("gate_proj", "up_proj", "down_proj"),
    "deepseek_v3": ("gate_proj", "up_proj", "down_proj"),
    "glm4_moe": ("gate_proj", "up_proj", "down_proj"),
    "olmoe": ("gate_proj", "up_proj", "down_proj"),
    "mixtral": ("w1", "w3", "w2"),
}
_GATE_UP = ".experts.gate_up_proj"
_DOWN = ".experts.down_proj"
_TIED = "lm_head.weight"


def to_checkpoint(state_dict: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the checkpoint tensors of ``module.state_dict()``. ``config`` is the content of config.json.

    Experts are unfused, and a tied ``lm_head`` is omitted, as it is the embedding. Results are views, not copies, of
    the given tensors. Raises InvalidValue for fused experts of an unknown model type.
    """
    tied = bool(config.get("tie_word_embeddings", False))
    checkpoint: dict[str, Tensor] = {}
    for name, tensor in state_dict.items():
        if tied and name == _TIED:
            continue
        if name.endswith((_GATE_UP, _DOWN)):
            checkpoint.update(_experts(name, tensor, str(config.get("model_type"))))
        else:
            checkpoint[_module_name(name, str(config.get("model_type")))] = tensor
    return checkpoint


def _experts(name: str, tensor: Tensor, model_type: str) -> dict[str, Tensor]:
    if model_type not in _EXPERT_NAMES:
        raise InvalidValue("model_type", model_type, f"for fused experts one of {', '.join(sorted(_EXPERT_NAMES))}")
    gate, up, down = _EXPERT_NAMES[model_type]
    prefix = _module_name(name.rpartition(".")[0], model_type)
    if name.endswith(_DOWN):
        return {f"{prefix}.{e}.{down}.weight": tensor[e] for e in range(tensor.shape[0])}
    half = tensor.shape[1] // 2
    unfused: dict[str, Tensor] = {}
    for e in range(tensor.shape[0]):
        unfused[f"{prefix}.{e}.{gate}.weight"] = tensor[e, :half]
        unfused[f"{prefix}.{e}.{up}.weight"] = tensor[e, half:]
    return unfused


def _module_name(name: str, model_type: str) -> str:
    # Mixtral's checkpoints use an old name of the block; transformers renames it while loading.
    return name.replace(".mlp.", ".block_sparse_moe.") if model_type == "mixtral" else name
