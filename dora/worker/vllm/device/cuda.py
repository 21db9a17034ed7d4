"""The device port's adapter for NVIDIA GPUs."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from dora.engine_patches.patch import Patch
from dora.errors import InvalidValue
from dora.host.proof import proof_file
from dora.worker.reservation import KvStore
from dora.worker.vllm.device.port import Dtype, EngineSettings, Kind, check_installed

if TYPE_CHECKING:
    import numpy as np
    import torch

    from dora.engine_patches.mapped_weights import Source
    from dora.weights.image import ImageNote
    from dora.worker.drafting.model_drafter import Choose

CHUNK_TOKENS: Final = 8192  # of prompts in one step, beside decodes
LANDING_SHIFT: Final = 7  # KV that arrives straight from a GPU may take a 128th of this one's memory
# Compute capabilities of tensor cores for int8 and fp8, where vLLM 0.32 has kernels for weights and activations.
QUANTISED_FROM: Final = {"int8": 75, "fp8": 89}
INVARIANT_FROM: Final = 80  # compute capability 8.0: vLLM 0.32, docs/features/batch_invariance.md


class Cuda:
    """Engines on GPUs: CUDA graphs, chunked prefill, Model Runner V2 without patches to its noise.

    The runner's noise is a function of seed, position and token, and a request carries its outputs to the runner
    (vllm/v1/worker/gpu), so a resumed request needs nothing else.
    """

    kind: Kind = "cuda"
    default_dtype: Dtype = "bfloat16"
    worker_class = "dora.worker.vllm.device.cuda_rank.CudaRank"
    fixed_arguments: Mapping[str, str] = {}
    proves_reloads = True
    environment: Mapping[str, str] = {
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a forked rank could not use CUDA if this process has
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "TRITON_F32_DEFAULT": "ieee",  # else Triton's attention kernel computes float32 in TF32
    }

    def __init__(self, *, proves_ranks: bool = False) -> None:
        """With ``proves_ranks`` engines of several ranks start without a proof, since this one is to make it."""
        self._proves_ranks = proves_ranks

    def check_platform(self, settings: EngineSettings) -> None:
        from vllm.platforms import current_platform

        check_installed(self.kind, current_platform.device_type)
        if settings.ranks > 1 and not self._proves_ranks and not proof_file("ranks").is_file():
            allowed = "1, until `dora doctor --device cuda --stage ranks` has proven engines of several GPUs here"
            name = "tensor_parallel" if settings.tensor_parallel > 1 else "pipeline_parallel"
            raise InvalidValue(f"workers.{name}", getattr(settings, name), allowed)
        for name in ("quantisation", "kv_dtype"):
            value = getattr(settings, name)
            least = QUANTISED_FROM.get(value.split("_")[0], 0)
            if least and not current_platform.has_device_capability(least):
                found = current_platform.get_device_capability()
                allowed = f"empty: it needs compute capability {least / 10}, and this GPU has {found}"
                raise InvalidValue(f"workers.{name}", value, allowed)
        if settings.batch_invariant and not current_platform.has_device_capability(INVARIANT_FROM):
            found = current_platform.get_device_capability()
            allowed = f"false: vLLM's mode needs compute capability {INVARIANT_FROM / 10}, and this GPU has {found}"
            raise InvalidValue("workers.batch_invariant", True, allowed)

    def draft_sampler(self, settings: EngineSettings) -> "Choose":
        from dora.engine_patches.own_noise_v2 import sampled_alike

        return partial(sampled_alike, use_fp64=bool(settings.engine_args.get("use_fp64_gumbel")))

    def patches(self) -> Sequence[Patch]:
        from dora.engine_patches import mapped_weights, own_noise_v2, stages_in_turn

        return (mapped_weights.PATCH, stages_in_turn.PATCH, own_noise_v2.PATCH)

    def check_runner(self, runner: Any) -> str:
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner

        if isinstance(runner, GPUModelRunner):
            return ""
        return f"the model runner is {type(runner).__module__}.{type(runner).__name__}, not vLLM's Model Runner V2"

    def arguments(self, settings: EngineSettings) -> dict[str, Any]:
        return {
            "enforce_eager": False,
            "enable_chunked_prefill": True,
            "max_num_batched_tokens": max(CHUNK_TOKENS, settings.slots),
            "block_size": settings.block_tokens or None,
            "gpu_memory_utilization": settings.memory_share,
        }

    def resume_arguments(self, outputs: Sequence[int], prompt: Sequence[int], draws: int) -> dict[str, Any] | None:
        return None

    def weight_source(self, device: "torch.device", ranks: int) -> "Source":
        from dora.worker.copying.weight_sources import mapped, pinned

        return pinned(device) if ranks == 1 else mapped

    def image_source(self, note: "ImageNote", device: "torch.device") -> "Source | None":
        from dora.weights.cuda_image import opened
        from dora.worker.copying.image_source import image_source

        return image_source(note, opened, device)

    def handle(self, tensor: "torch.Tensor") -> tuple[Any, ...]:
        from torch.multiprocessing.reductions import reduce_tensor

        handle: tuple[Any, ...] = reduce_tensor(tensor)[1]  # of CUDA IPC
        return handle

    def opened(self, handle: tuple[Any, ...]) -> "torch.Tensor":
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        tensor: torch.Tensor = rebuild_cuda_tensor(*handle)
        return tensor

    def kv_store(
        self,
        rows: "Callable[[], Mapping[str, Sequence[np.ndarray]]]",
        tensors: "Callable[[], Sequence[Mapping[str, torch.Tensor]]]",
        groups: Mapping[str, int],
        block_count: int,
    ) -> KvStore:
        from dora.worker.copying.device_memory import LANDING_BYTES
        from dora.worker.copying.rank_stores import store_of_ranks

        if not proof_file("kv").is_file():
            return store_of_ranks(tensors(), groups, block_count)
        import torch

        found = tensors()
        device = next(iter(found[0].values())).device
        total_bytes = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
        return store_of_ranks(found, groups, block_count, max(LANDING_BYTES, total_bytes >> LANDING_SHIFT))
