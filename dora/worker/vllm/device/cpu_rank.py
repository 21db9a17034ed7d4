"""A rank of an engine on a CPU. Its import replaces parts of ``torch.cuda`` (see ``dora.engine_patches.cpu``)."""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from dora.worker.vllm.device.cpu import Cpu
from dora.worker.vllm.device.rank import Rank


class CpuRank(Rank, CPUWorker):
    device_port = Cpu()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self.vllm_config.parallel_config.pipeline_parallel_size > 1:
            self._make_room_between_stages()

    def _make_room_between_stages(self) -> None:
        """Allocates memory for the previous stage's output. vLLM's warm-up does it, but eager CPU engines skip that."""
        runner = self.model_runner
        runner.intermediate_tensors = runner.get_model().make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )
