"""Sizes of workers on GPUs that follow from GPU, model and context: slots, and host memory for KV in flight."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dora.config import Config
from dora.config.processes import WorkersConfig
from dora.data.hardware import find_hardware, hardware_of
from dora.errors import InvalidValue, LimitExceeded
from dora.host.placement import VISIBLE, Gpu, Placement, placement_of
from dora.models import kv_token_bytes
from dora.models.drafts import draft_folder, weights_bytes
from dora.weights.holds import GPUS_FILE
from dora.weights.reference import Reference

RESERVE_BYTES: Final = 5e9  # a GPU's activations, graphs and communication buffers, as in dora plan
SLOTS_MIN, SLOTS_MAX, SLOTS_STEP = 16, 256, 8
KV_MB_MIN, KV_MB_MAX = 1024, 8192  # the engine's pinned memory ends there
FIRST_LOADS: Final = 8  # the first load of an engine proves reloads
_ON_PAPER: Final = re.compile(r"cuda:([A-Za-z][\w.-]*)x(\d{1,3})")


def on_paper(workers: WorkersConfig) -> bool:
    """Returns whether ``workers.device`` names GPUs by data sheet, such as cuda:H100x8, which a dry run allows."""
    return _ON_PAPER.fullmatch(workers.device) is not None


def placement_for(workers: WorkersConfig) -> Placement:
    """Returns the workers' placement on this machine, or on GPUs on paper. Raises InvalidValue as ``placement_of``, and
    for a name without a data sheet.
    """
    match = _ON_PAPER.fullmatch(workers.device)
    if match is None:
        return placement_of(workers.device, for_trainer=workers.gpus_for_trainer)
    sheet = find_hardware(match[1], "workers.device")
    found = [Gpu(sheet.name, f"GPU-{number}", f"{number:02}") for number in range(int(match[2]))]
    return placement_of("cuda", for_trainer=workers.gpus_for_trainer, found=found, environment={})


@dataclass(frozen=True, slots=True)
class DeviceSizes:
    """Holds a start's choice for a worker on GPUs, and the data sheet's bounds. ``kv_tokens`` 0 means unknown."""

    gpu: str
    slots: int
    kv_mb: int
    context_tokens: int
    kv_tokens: int = 0
    reload_s: float = 0.0

    def __str__(self) -> str:
        chosen = f"{self.slots} slots, kv.memory_mb = {self.kv_mb:,}, contexts of up to {self.context_tokens:,} tokens"
        if not self.reload_s:
            return f"{chosen}; there is no data sheet of {self.gpu}"
        loads = f"a reload takes at least {self.reload_s:.1f} s, the first load {FIRST_LOADS * self.reload_s:.0f} s"
        said = f"{chosen}; by the data sheet of {self.gpu}: KV of about {self.kv_tokens:,} tokens a worker, {loads}"
        if self.kv_tokens >= self.context_tokens:
            return said
        return f"{said}; warning: no request of that context fits: set workers.max_model_len_tokens or tensor_parallel"


def device_sizes(config: Config, model: Path, reference: Reference, placement: Placement) -> DeviceSizes | None:
    """Returns the sizes of workers on GPUs, or None on CPUs.

    Requests hold half of their longest response on average. Raises InvalidValue if the slots are to be chosen and the
    GPU has no data sheet, and LimitExceeded if a draft model leaves no room for the model.
    """
    if not placement.gpus:
        return None
    workers, gpu = config.workers, placement.gpus[0].model
    context, token_bytes = workers.context_tokens, kv_token_bytes(model)
    kv_mb = config.kv.memory_mb or min(KV_MB_MAX, max(KV_MB_MIN, context * token_bytes // 10**6))
    sheet = hardware_of(gpu)
    if sheet is None or not token_bytes:
        if not workers.slots:
            raise InvalidValue("workers.slots", 0, f"at least 1: no data sheet of {gpu} or size of KV to choose it by")
        return DeviceSizes(gpu, workers.slots, kv_mb, context)
    folder = draft_folder(workers.speculation)
    draft_bytes = 0 if folder is None else weights_bytes(folder) + workers.history_mb * 10**6
    room_bytes = sheet.memory_bytes * workers.gpu_memory_utilisation - draft_bytes
    if draft_bytes and room_bytes * workers.ranks <= reference.content_bytes:
        allowed = f"a smaller draft model, or less of workers.history_mb: beside its {draft_bytes:,} bytes there is no"
        raise LimitExceeded("workers.speculation", workers.speculation, f"{allowed} room for the model on {gpu}")
    each_bytes = room_bytes - RESERVE_BYTES
    kv_tokens = max(0, int((each_bytes * workers.ranks - reference.content_bytes) / token_bytes))
    held = max(1, min(context, config.rollout.max_tokens) // 2)
    slots = min(SLOTS_MAX, max(SLOTS_MIN, kv_tokens // held // SLOTS_STEP * SLOTS_STEP))
    reload_s = reference.content_bytes / workers.ranks / sheet.bus_bytes_per_s
    return DeviceSizes(gpu, workers.slots or slots, kv_mb, context, workers.kv_tokens or kv_tokens, reload_s)


def with_sizes(config: Config, sizes: DeviceSizes | None) -> Config:
    """Returns the configuration with these sizes."""
    if sizes is None:
        return config
    workers = config.workers.model_copy(update={"slots": sizes.slots})
    return config.model_copy(update={"workers": workers, "kv": config.kv.model_copy(update={"memory_mb": sizes.kv_mb})})


def trainer_command(placement: Placement, address: str) -> str:
    """Returns the command of the reference trainer on the GPUs that no worker gets, or an empty text without any."""
    own = placement.for_trainer
    if not own:
        return ""
    start = "python" if len(own) == 1 else f"torchrun --standalone --nproc-per-node {len(own)}"
    visible = ",".join(gpu.uuid for gpu in own)
    return f"{VISIBLE}={visible} {start} -m dora.trainers.grpo --device cuda --dtype bfloat16 --address {address}"


def write_gpus(folder: Path, placement: Placement, workers: WorkersConfig) -> None:
    """Writes which GPUs a trainer on this host gets, and whose the others are, by UUID, for ``trainers.start``."""
    names = {gpu.uuid: f"worker {number // workers.ranks}" for number, gpu in enumerate(placement.gpus)}
    taken = dict(list(names.items())[: workers.count * workers.ranks])
    content = {"trainer": [gpu.uuid for gpu in placement.for_trainer], "taken": taken}
    (folder / GPUS_FILE).write_text(json.dumps(content))
