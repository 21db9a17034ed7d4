"""The rank of ``tests.device_ranks``. Its import replaces parts of ``torch.cuda``."""

from vllm.distributed.kv_transfer import get_kv_transfer_group

from dora.worker.vllm.device.cpu_rank import CpuRank
from dora.worker.vllm.device.rank import RankKv
from tests.device_ranks import AsDevices, on_device


class DeviceRank(CpuRank):
    """vLLM's CPU worker, whose KV the engine opens by handles."""

    device_port = AsDevices()

    def shown_kv(self) -> RankKv:
        kv: RankKv = super().shown_kv()
        connector = get_kv_transfer_group()
        return kv if connector.is_alone else on_device(kv, self.device_port, connector.tensors)
