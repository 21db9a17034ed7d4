"""The choice of a device by the name of its kind."""

from dora.errors import InvalidValue, one_of
from dora.worker.vllm.device.cpu import Cpu
from dora.worker.vllm.device.cuda import Cuda
from dora.worker.vllm.device.port import KINDS, Device


def device_named(kind: str) -> Device:
    """Returns the adapter of a kind. Raises InvalidValue for an unknown one. Imports no vLLM."""
    if kind == "cpu":
        return Cpu()
    if kind == "cuda":
        return Cuda()
    raise InvalidValue("device", kind, one_of(kind, KINDS))
