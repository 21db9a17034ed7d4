"""An engine on vLLM's Model Runner V2, the runner of GPUs, on a CPU: Triton's interpreter runs its kernels.

Kernels of attention and of layers stay the CPU's, and CUDA graphs, streams and device memory are not covered. torch and
vLLM look for Triton while they are imported, so a process has either this runner or the CPU's: ``make test-v2`` runs
the engine's contract suite with ``DORA_TEST_RUNNER=v2``, ``TRITON_INTERPRET=1`` and Triton's folder on the path.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from dora.engine_patches.patch import Patch
from dora.worker.vllm.device.cpu import Cpu
from dora.worker.vllm.device.port import EngineSettings

SITE: Final = str(Path(__file__).with_name("v2_site"))  # what its processes run first
IS_CHOSEN: Final = os.environ.get("DORA_TEST_RUNNER") == "v2"


class V2OnCpu(Cpu):
    """The CPU's kernels under the runner of GPUs, whose sampling needs no patch."""

    worker_class = "tests.v2_rank.V2Rank"
    proves_reloads = True
    environment: Mapping[str, str] = {
        **Cpu.environment,
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }

    def patches(self) -> Sequence[Patch]:
        from dora.engine_patches import own_noise_v2, stages_in_turn
        from dora.engine_patches.cpu import exact_resume, own_noise

        of_cpu_runner = (exact_resume.PATCH, own_noise.PATCH)
        kept = [patch for patch in super().patches() if patch not in of_cpu_runner]
        return [*kept, stages_in_turn.PATCH, own_noise_v2.PATCH]

    def check_runner(self, runner: Any) -> str:
        from dora.worker.vllm.device.cuda import Cuda

        return Cuda().check_runner(runner)

    def weight_source(self, device: Any, ranks: int) -> Any:
        from dora.worker.vllm.device.cuda import Cuda

        return Cuda().weight_source(device, ranks)

    def draft_sampler(self, settings: EngineSettings) -> Any:
        from dora.worker.vllm.device.cuda import Cuda

        return Cuda().draft_sampler(settings)

    def resume_arguments(self, outputs: Sequence[int], prompt: Sequence[int], draws: int) -> dict[str, Any] | None:
        return None


def prepare() -> None:
    """Makes vLLM's CPU build accept Triton, also in the processes of an engine's ranks. Before vLLM is imported."""
    os.environ.update(V2OnCpu.environment)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if SITE not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([SITE, *paths])
    import triton.backends

    class Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    class Backend:
        driver = Driver

    triton.backends.backends["cpu"] = Backend
