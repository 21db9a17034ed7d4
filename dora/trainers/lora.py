"""The weights of a model with LoRA adapters of peft, merged: what a service publishes.

The adapter's product is added to a copy, so the base weights stay as they are: merging and unmerging the model itself
would round them anew at each commit. torch and peft are those of the model.
"""

from typing import Any, Final

from dora.errors import InvalidValue

_PREFIX: Final = "base_model.model."
_BASE: Final = ".base_layer."


def is_adapted(model: Any) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "base_model")


def merged(model: Any) -> dict[str, Any]:
    """Returns the whole model's tensors by their names without adapters. Raises InvalidValue if one cannot be merged.

    Tensors without an adapter are the model's own; the others are new, in the dtype of the base weight.
    """
    for name, config in model.peft_config.items():
        if str(getattr(config.peft_type, "value", config.peft_type)) != "LORA" or getattr(config, "use_dora", False):
            raise InvalidValue(
                f"peft_config: {name}", config.peft_type, "plain LoRA: its product is added to the weights"
            )
        if getattr(config, "bias", "none") != "none" or getattr(config, "modules_to_save", None):
            raise InvalidValue(f"peft_config: {name}", config.bias, "without modules_to_save, and with bias='none'")
    deltas = {}
    for name, layer in model.named_modules():
        if not hasattr(layer, "get_delta_weight") or not hasattr(layer, "active_adapters"):
            continue
        deltas[f"{name}.weight"] = [
            layer.get_delta_weight(each) for each in layer.active_adapters if each in layer.lora_A
        ]
    found = {}
    for name, tensor in model.state_dict().items():
        if ".lora_" in name:
            continue
        plain = name.replace(_BASE, ".")
        for delta in deltas.get(plain, ()):
            tensor = (tensor + delta).to(tensor.dtype)
        found[plain.removeprefix(_PREFIX)] = tensor.detach()
    return found
