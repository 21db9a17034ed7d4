"""Selects a trainer's initial weights, moments and reference by the service's next step and the checkpoints."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from dora.client import Attachment
from dora.client.publication import check_module
from dora.errors import MISSING, Conflict, InvalidValue
from dora.trainers.checkpoint import path_of, position_of, read_moments, steps_in
from dora.trainers.learner import Learner
from dora.trainers.options import GrpoConfig
from dora.trainers.ranks import Ranks
from dora.weights.holds import GPUS_FILE
from dora.weights.reference import TensorHeader

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Start:
    """A trainer's start, equal on every rank: folders that all of them read."""

    step: int
    weights: str
    moments: str  # a checkpoint; empty: none
    reference: str  # empty: there is no KL term
    reference_version: int
    gpus: Mapping[str, Any] = field(default_factory=dict)  # of the service's host, as it wrote them

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def of_bytes(cls, content: bytes) -> "Start":
        return cls(**json.loads(content))


def start_of(config: GrpoConfig, attachment: Attachment) -> Start:
    """Returns the checkpoint of the next step, if there is one, or that of ``begin_from`` for a new run. Otherwise the
    weights of the service's newest version, with the moments of the newest earlier checkpoint, if any.

    Raises Conflict if all checkpoints are of later steps or use another reference version, and if weights are not on
    this host; InvalidValue for a folder without a model.
    """
    checkpoint = _checkpoint(config, attachment) if config.checkpoints else None
    step = attachment.next_step
    if checkpoint is None and config.begin_from:
        weights = checkpoint = _begun_from(config.begin_from, step)
    elif checkpoint is not None and checkpoint.name == path_of(Path(), step).name:
        weights = checkpoint
    else:
        weights = Path(config.model) if config.model else _version(attachment, step, "--model")
    reference: Path | str = ""
    if config.learner.objective.needs_reference:
        version = attachment.reference_version
        reference = _folder(
            Path(config.reference) if config.reference else _version(attachment, version, "--reference")
        )
    moments = str(checkpoint) if checkpoint is not None else ""
    gpus = {}
    if attachment.store_folder is not None:
        with suppress(OSError):  # a service without workers of its own
            gpus = json.loads((attachment.store_folder / GPUS_FILE).read_text())
    return Start(step, str(_folder(weights)), moments, str(reference), attachment.reference_version, gpus)


def make_learner(config: GrpoConfig, start: Start, ranks: Ranks, tensors: Sequence[TensorHeader] = ()) -> Learner:
    """Makes one rank's learner, from the same folders on each. ``tensors`` are those that the service expects.

    Raises Conflict if the model's tensors differ, as the service then has another model.
    """
    device = torch.device("cpu")
    if config.device == "cuda":
        visible = [f"GPU-{torch.cuda.get_device_properties(each).uuid}" for each in range(torch.cuda.device_count())]
        device = torch.device("cuda", gpu_of(visible, int(os.environ.get("LOCAL_RANK", "0")), start.gpus))
        torch.cuda.set_device(device)
    module = _module(start.weights, config.dtype).to(device).train()
    try:
        check_module(module, tensors)
    except InvalidValue as error:
        raise Conflict("--model", start.weights, f"the service's model ({error})", "is another model") from error
    if config.layers:
        decoder_layers = module.get_decoder().layers
        if config.layers > len(decoder_layers):
            raise InvalidValue("--layers", config.layers, f"0 to {len(decoder_layers)}, the layers of the model")
        module.requires_grad_(False)
        decoder_layers[-config.layers :].requires_grad_(True)
    reference = _module(start.reference, config.dtype).to(device).eval() if start.reference else None
    learner = Learner(
        module,
        config.learner,
        reference=reference,
        reference_version=start.reference_version,
        ranks=ranks,
        step=start.step,
    )
    if start.moments:
        learner.set_moments(read_moments(Path(start.moments)))
    return learner


def gpu_of(visible: Sequence[str], local_rank: int, gpus: Mapping[str, Any]) -> int:
    """Returns the index of a rank's GPU among the ``visible`` UUIDs: on the service's host the next of those that it
    keeps for a trainer. Warns, by its worker's name, of a GPU that is not among them.
    """
    own = [visible.index(uuid) for uuid in gpus.get("trainer", ()) if uuid in visible]
    number = own[local_rank] if local_rank < len(own) else local_rank
    uuid = visible[number] if number < len(visible) else ""
    if worker := gpus.get("taken", {}).get(uuid):
        log.warning("this trainer is on %s, the GPU of %s: set workers.gpus_for_trainer, or CUDA_VISIBLE_DEVICES",
                    uuid, worker)  # fmt: skip
    return number


def _begun_from(checkpoint: str, step: int) -> Path:
    """Returns a checkpoint of another run. Raises InvalidValue if it is none, Conflict if this run has begun."""
    if step:
        raise Conflict("--begin-from", checkpoint, "left out, or with a new service", f"is not for step {step}")
    position_of(Path(checkpoint))
    return Path(checkpoint)


def _checkpoint(config: GrpoConfig, attachment: Attachment) -> Path | None:
    folder, step = Path(config.checkpoints), attachment.next_step
    steps = steps_in(folder)
    usable = [each for each in steps if each <= step]
    if not usable:
        if steps:
            why = f"has only checkpoints of later steps, from {steps[0]} on"
            raise Conflict("--checkpoints", str(folder), f"one with step {step} or earlier, or empty", why)
        return None
    found = path_of(folder, usable[-1])
    version = position_of(found).reference_version
    if version != attachment.reference_version:
        allowed = f"{attachment.reference_version}, the service's rollout.reference_version"
        raise Conflict(f"{found.name}: reference_version", version, allowed, "is another one")
    if usable[-1] < step:
        log.warning("the newest checkpoint is of step %d, and the service is at step %d: continuing with its weights, "
                    "with the checkpoint's moments", usable[-1], step)  # fmt: skip
    return found


def _version(attachment: Attachment, version: int, option: str) -> Path:
    if attachment.store_folder is not None:
        folder = attachment.store_folder / "versions" / str(version)
        if folder.is_dir():
            return folder
    if version == 0:
        return Path(attachment.model)
    raise Conflict(option, MISSING, f"the folder of version {version}, on this host")


def _folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise InvalidValue("--model", str(folder), "a Hugging Face model folder on this host")
    return folder


def _module(folder: str, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
