"""Loads weights from files of the host: a backend of vLLM's weight transfer.

vLLM's own backends receive from a trainer's process, by NCCL or CUDA IPC. This backend is registered beside them and
driven the same way (start, update, finish). The device port says how tensors get from the files to the device: a CPU
maps the files (``mapped_tensors``), as do several GPUs of one engine; a single one copies through pinned memory
(worker/copying/weight_ring.py). Layers are loaded one by one over the running model's tensors, whose addresses stay;
then the patches repair what vLLM leaves stale (registry.py).
Source: vllm/distributed/weight_transfer/base.py, nccl_engine.py.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from dora.engine_patches import reload_proof
from dora.engine_patches.patch import Patch, PatchFailed, nothing
from dora.engine_patches.quantised import kind_of, quantised

NAME: Final = "mapped_weights"
BACKEND: Final = "dora"  # the name in vLLM's ``weight_transfer_config``

Tensors = Generator[tuple[str, torch.Tensor], None, None]
Source = Callable[[Sequence[str], float], Tensors]  # files, and the seconds after which their load has failed


@dataclass
class NothingToInit(WeightTransferInitInfo):
    """An empty message, because files need no process group."""


@dataclass
class WeightFiles(WeightTransferUpdateInfo):
    """Paths of verified safetensors files of the whole model, and the time that they may take to load.

    ``reload_proof`` describes ``changed`` and ``token_ids``.
    """

    files: Sequence[str]
    limit_s: float
    changed: str = ""
    token_ids: Sequence[int] = ()


class MappedWeights(WeightTransferEngine[NothingToInit, WeightFiles]):
    """One rank's half of an update. After a failed one the model keeps its shapes, and its weights have no version."""

    init_info_cls = NothingToInit
    update_info_cls = WeightFiles
    supports_draft_weight_update = False
    source: Source  # the device's, set by the rank

    def init_transfer_engine(self, init_info: NothingToInit) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            self.finish_weight_update()  # otherwise the next update would continue this one
            raise
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: WeightFiles) -> None:
        with closing(self.source(update_info.files, update_info.limit_s)) as found:
            tensors: Iterator[tuple[str, torch.Tensor]] = found
            if update_info.changed:
                tensors = reload_proof.changed(tensors, update_info.changed, update_info.token_ids)
            if kind := kind_of(self.vllm_config.model_config.hf_config):
                tensors = quantised(tensors, kind)
            self.model.load_weights(tensors)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass


def mapped_tensors(files: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields name and tensor. Each tensor is a view of the file's pages, which are read when a layer's loader takes its
    part: a rank of tensor, pipeline or expert parallelism reads only the pages of its own part.
    """
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
