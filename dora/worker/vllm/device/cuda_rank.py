"""A rank of an engine on a GPU."""

from vllm.v1.worker.gpu_worker import Worker

from dora.worker.vllm.device.cuda import Cuda
from dora.worker.vllm.device.rank import Rank


class CudaRank(Rank, Worker):
    device_port = Cuda()
