"""The device port's adapter for CPUs."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from dora.engine_patches.patch import Patch
from dora.errors import InvalidValue
from dora.worker.reservation import KvStore
from dora.worker.vllm.device.port import Dtype, EngineSettings, Kind, check_installed

if TYPE_CHECKING:
    import numpy as np
    import torch

    from dora.engine_patches.mapped_weights import Source
    from dora.weights.image import ImageNote
    from dora.worker.drafting.model_drafter import Choose

log = logging.getLogger("dora.worker")

FEATURES: Final = ("avx2", "avx512", "avx512_bf16", "amx_tile", "amx_fp16")
PROFILE_BYTES: Final = 1 << 20  # vLLM wants a size here; the engine's core overrides it


def features() -> list[str]:
    """Returns the instruction sets of this CPU by which vLLM chooses kernels."""
    import torch

    return [name for name in FEATURES if getattr(torch.cpu, f"_is_{name}_supported")()]


def latent_backend(dtype: str) -> str:
    """Returns vLLM's backend for latent attention. That for AMX, which vLLM prefers where it can, takes bfloat16."""
    return "AMX_MLA" if dtype == "bfloat16" and "amx_tile" in features() else "CPU_MLA"


class Cpu:
    """Engines on a CPU: eager, one thread, Model Runner V1 with patches."""

    kind: Kind = "cpu"
    default_dtype: Dtype = "float32"
    worker_class = "dora.worker.vllm.device.cpu_rank.CpuRank"
    fixed_arguments: Mapping[str, str] = dict.fromkeys(
        ("enforce_eager", "enable_chunked_prefill", "max_num_batched_tokens"),
        "engines on CPUs run eagerly, and compute a prompt in one step",
    )
    proves_reloads = False  # the patches prove each kind of layer that a reload could leave stale
    environment: Mapping[str, str] = {
        # Compiling small helpers costs seconds a start, and a C++ compiler that may not be there.
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise an engine of several ranks needs a NUMA node for each
    }

    def check_platform(self, settings: EngineSettings) -> None:
        from vllm.platforms import current_platform

        check_installed(self.kind, current_platform.device_type)
        if settings.batch_invariant:
            allowed = "false: vLLM has this mode on GPUs; on CPUs logits do not depend on neighbours with one thread"
            raise InvalidValue("workers.batch_invariant", True, allowed)
        if settings.quantisation == "fp8":
            allowed = "empty or int8: fp8 needs a GPU of compute capability 8.9 or above"
            raise InvalidValue("workers.quantisation", "fp8", allowed)
        if settings.kv_dtype:
            from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

            known = [each for each in CPUAttentionBackend.supported_kv_cache_dtypes if each != "auto"]
            if settings.kv_dtype not in known:
                raise InvalidValue("workers.kv_dtype", settings.kv_dtype, f"empty, {', '.join(known)} on CPUs")
        chosen = settings.engine_args.get("attention_backend", latent_backend(settings.dtype))
        log.info("CPU: %s; latent attention by %s", ", ".join(features()) or "no vector instructions", chosen)

    def draft_sampler(self, settings: EngineSettings) -> "Choose":
        from dora.engine_patches.cpu.own_noise import sampled_alike

        return sampled_alike

    def patches(self) -> Sequence[Patch]:
        from dora.engine_patches.cpu import registry

        return registry.PATCHES

    def check_runner(self, runner: Any) -> str:
        return ""  # ``exact_resume`` verifies it

    def arguments(self, settings: EngineSettings) -> dict[str, Any]:
        return {
            "enforce_eager": True,
            # Chunked prefill breaks seeded requests on CPU, so a step must have room for the longest prompt beside
            # decodes.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": settings.max_model_len_tokens + settings.slots,
            "attention_backend": latent_backend(settings.dtype),  # vLLM uses it in layers with latent attention alone
            "block_size": settings.block_tokens,
            "kv_cache_memory_bytes": PROFILE_BYTES,
        }

    def resume_arguments(self, outputs: Sequence[int], prompt: Sequence[int], draws: int) -> dict[str, Any] | None:
        from dora.engine_patches.cpu.exact_resume import DRAWS_KEY, OUTPUTS_KEY, PROMPT_KEY

        return {OUTPUTS_KEY: list(outputs), PROMPT_KEY: prompt, DRAWS_KEY: draws}

    def weight_source(self, device: "torch.device", ranks: int) -> "Source":
        from dora.worker.copying.weight_sources import mapped

        return mapped

    def image_source(self, note: "ImageNote", device: "torch.device") -> "Source | None":
        return None  # the file's pages are the trainer's own copy

    def handle(self, tensor: "torch.Tensor") -> tuple[Any, ...]:
        raise NotImplementedError("KV on a CPU is mapped memory (KvMemory)")

    def opened(self, handle: tuple[Any, ...]) -> "torch.Tensor":
        raise NotImplementedError("KV on a CPU is mapped memory (KvMemory)")

    def kv_store(
        self,
        rows: "Callable[[], Mapping[str, Sequence[np.ndarray]]]",
        tensors: "Callable[[], Sequence[Mapping[str, torch.Tensor]]]",
        groups: Mapping[str, int],
        block_count: int,
    ) -> KvStore:
        from dora.worker.vllm.blocks import BlockStore

        return BlockStore(rows(), groups)
