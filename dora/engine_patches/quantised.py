"""Projections quantised to int8 while a version is loaded, each with scales of its own: one for each output channel.

The engine is made for the form that compressed-tensors calls W8A8: int8 weights, symmetric; activations quantised token
by token. A trainer publishes in floating point, so the worker quantises as the tensors come (round to nearest, the
largest of a channel becomes 127); the logprobs that it reports are the quantised model's own. Experts, embeddings,
heads, norms and routers stay as they are.
Source: vllm/model_executor/layers/quantization/compressed_tensors, compressed_tensors_w8a8_int8.py.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel

from dora.engine_patches.patch import Patch, PatchFailed, nothing
from dora.models.int8 import int8_of, is_quantised

NAME: Final = "quantised"
# Of modules, by vLLM's names: what is not quantised. MLA takes kv_b_proj apart, so it has to be plain.
_PLAIN: Final = ("lm_head", "re:.*embed.*", "re:.*experts.*", "re:.*gate$", "re:.*kv_b_proj.*", "re:.*_mqa.*")


def settings(quantisation: str) -> dict[str, Any] | None:
    """What an engine's config.json would say; None: nothing is quantised."""
    if not quantisation:
        return None
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations},
        },
        "ignore": list(_PLAIN),
        "quantization_status": "compressed",
    }


def quantised(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each projection as int8, followed by its scales; all else as it comes."""
    for name, tensor in tensors:
        if not is_quantised(name):
            yield name, tensor
            continue
        weights, scales = int8_of(tensor)
        yield name, weights
        yield f"{name}_scale", scales


def _apply() -> None:
    """Keeps a layer's scales as long as its kernel, which has their address and not them.

    After a reload vLLM copies the scales to where the old ones lay, and lets those go that the kernel was made with:
    what it reads then is anything (measured: NaN, or another model's logprobs).
    """
    process = CPUInt8ScaledMMLinearKernel.process_weights_for_onednn
    if getattr(process, "keeps_scales", False):
        return

    def keeping(self: Any, layer: Any) -> None:
        process(self, layer)
        self.kept_scales = getattr(layer, self.layer_param_names[1])

    keeping.keeps_scales = True  # type: ignore[attr-defined]
    CPUInt8ScaledMMLinearKernel.process_weights_for_onednn = keeping


def _verify(runner: Any) -> None:
    for module in runner.get_model().modules():
        kernel = getattr(getattr(module, "scheme", None), "kernel", None)
        if isinstance(kernel, CPUInt8ScaledMMLinearKernel) and hasattr(kernel, "dnnl_handler"):
            if getattr(kernel, "kept_scales", None) is None:
                raise PatchFailed(NAME, "a quantised layer's kernel was made without keeping its scales")
            return


PATCH = Patch(
    name=NAME,
    vllm_range=">=0.32,<0.33",
    reason="on CPU the kernel of a quantised layer reads its scales where they lay when it was made",
    apply=_apply,
    verify=_verify,
    after_reload=nothing,
)
