"""The rank of an engine on Model Runner V2 on a CPU (``tests.v2_runner``)."""

from vllm.v1.sample.ops import topk_topp_sampler

from dora.worker.vllm.device.cpu_rank import CpuRank
from tests.v2_runner import V2OnCpu

# The interpreter cannot run this kernel: it calls a method of a Triton value on a loop's index.
topk_topp_sampler.apply_top_k_top_p_triton = topk_topp_sampler.apply_top_k_top_p_pytorch


class V2Rank(CpuRank):
    """vLLM's CPU worker with the runner of GPUs."""

    device_port = V2OnCpu()
