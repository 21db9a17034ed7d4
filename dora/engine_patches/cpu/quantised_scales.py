"""Keeps the scales of a quantised layer alive as long as its CPU kernel, and chooses a kernel that takes its dtype.

After a reload vLLM copies the scales to their old address and frees the tensors with which the kernel was created. The
kernel, which holds only their address, would then read freed memory: NaN, or wrong logprobs. On CPUs with AMX vLLM
chooses a kernel that takes bfloat16 and float16 alone, for layers in float32 too.
"""

from typing import Any, Final

import torch
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel

from dora.engine_patches.patch import Patch, PatchFailed, nothing

NAME: Final = "quantised_scales"


def _apply() -> None:
    process = CPUInt8ScaledMMLinearKernel.process_weights_for_onednn
    if getattr(process, "keeps_scales", False):
        return

    def keeping(self: Any, layer: Any) -> None:
        process(self, layer)
        self.kept_scales = getattr(layer, self.layer_param_names[1])

    choose = CPUInt8ScaledMMLinearKernel.process_weights_after_loading

    def choosing(self: Any, layer: Any) -> None:
        if layer.params_dtype != torch.float32:
            choose(self, layer)
            return
        self.linear_method = self._apply_weights_onednn
        self.process_weights_for_onednn(layer)

    keeping.keeps_scales = True  # type: ignore[attr-defined]
    CPUInt8ScaledMMLinearKernel.process_weights_for_onednn = keeping
    CPUInt8ScaledMMLinearKernel.process_weights_after_loading = choosing


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
    reason="a quantised layer's CPU kernel reads its scales where they lay when it was made, and may not take float32",
    apply=_apply,
    verify=_verify,
    after_reload=nothing,
)
