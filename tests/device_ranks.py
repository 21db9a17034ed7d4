"""An engine of several ranks on a CPU as on GPUs: its process opens each rank's KV tensors by handles, with a store for
each rank. Only the handles differ from CUDA's: they name mapped memory.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dora.worker.reservation import KvStore
from dora.worker.vllm.device.cpu import Cpu

if TYPE_CHECKING:
    import torch


class AsDevices(Cpu):
    """Ranks whose KV counts as a device's."""

    worker_class = "tests.device_rank.DeviceRank"

    def handle(self, tensor: "torch.Tensor") -> tuple[Any, ...]:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        memory = get_kv_transfer_group().memory
        place = os.getpid(), memory.descriptor, memory.size_bytes
        return *place, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()

    def opened(self, handle: tuple[Any, ...]) -> "torch.Tensor":
        import torch

        from dora.worker.vllm.blocks import mapped

        pid, descriptor, size_bytes, dtype, shape, stride, offset = handle
        return torch.from_numpy(mapped(pid, descriptor, size_bytes)).view(dtype).as_strided(shape, stride, offset)

    def kv_store(self, *args: Any, **kwargs: Any) -> KvStore:
        from dora.worker.vllm.device.cuda import Cuda

        return Cuda().kv_store(*args, **kwargs)


def on_device(kv: Any, device: AsDevices, tensors: Mapping[str, "torch.Tensor"]) -> Any:
    """Returns a rank's KV (``RankKv``) as if it were on a device."""
    handles = {name: device.handle(tensor) for name, tensor in tensors.items()}
    return dataclasses.replace(kv, descriptor=-1, handles=handles)
