"""Weights come into an engine from files in its host's memory, mapped: vLLM's weight transfer, with DORA at its end.

vLLM's own backends receive from a trainer's process, by NCCL or CUDA IPC. This one is registered beside them and driven
the same way (start, update, finish). Each tensor is a window on the mapped file until a layer's loader takes its part
of it, so a rank of tensor, pipeline or expert parallelism touches the pages of its own part alone. Layers are loaded
one by one and written over the running model's tensors; then what vLLM leaves behind is repaired (registry.py).
Source: vllm/distributed/weight_transfer/base.py, nccl_engine.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from dora.engine_patches.patch import Patch, PatchFailed, nothing
from dora.engine_patches.quantised import quantised

NAME: Final = "mapped_weights"
BACKEND: Final = "dora"  # as vLLM's ``weight_transfer_config`` names it


@dataclass
class NothingToInit(WeightTransferInitInfo):
    """Files need no group of processes."""


@dataclass
class WeightFiles(WeightTransferUpdateInfo):
    """Paths of safetensors files, which hold the whole model and are checked."""

    files: Sequence[str]


class MappedWeights(WeightTransferEngine[NothingToInit, WeightFiles]):
    """One rank's end of an update. An update that fails leaves the model whole in shape, with weights of no version."""

    init_info_cls = NothingToInit
    update_info_cls = WeightFiles
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: NothingToInit) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            self.finish_weight_update()  # else the next update would go on where this one stopped
            raise
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: WeightFiles) -> None:
        tensors = mapped_tensors(update_info.files)
        if self.vllm_config.model_config.quantization is not None:
            tensors = quantised(tensors)
        self.model.load_weights(tensors)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass


def mapped_tensors(files: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor, each of which shows the file's own pages; nothing is read before it is looked at."""
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - a safetensors file is no mapping
                yield name, opened.get_tensor(name)


def _apply() -> None:
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, MappedWeights)


def _verify(_runner: Any) -> None:
    found = WeightTransferEngineFactory._registry[BACKEND]()
    if found is not MappedWeights:
        raise PatchFailed(NAME, f"the backend {BACKEND!r} is {found.__name__}")


PATCH = Patch(
    name=NAME,
    vllm_range=">=0.32,<0.33",
    reason="weights of a host's store are mapped and replaced in place, by vLLM's own interface",
    apply=_apply,
    verify=_verify,
    after_reload=nothing,
)
