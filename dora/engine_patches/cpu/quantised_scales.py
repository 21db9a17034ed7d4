"""Keeps the scales of a quantised layer alive as long as its CPU kernel, which holds only their address.

After a reload vLLM copies the scales to their old address and frees the tensors with which the kernel was created. The
kernel would then read freed memory: NaN, or wrong logprobs.
"""

from typing import Any, Final

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
