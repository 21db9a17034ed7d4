"""Trainer checkpoints: model, optimiser, step and reference version, written before the commit.

    FOLDER/step-12/model.safetensors        the weights that step 11 made, by Hugging Face names, in the trainer's dtype
    FOLDER/step-12/config.json
    FOLDER/step-12/optimizer.safetensors    AdamW's moments, by the parameters' names in the module
    FOLDER/step-12/trainer.json             the step that comes next, and the reference version
    FOLDER/step-12/replay.bin               the groups that later steps may replay, if the trainer has a replay buffer

A folder is complete or absent: it is written under a hidden name and renamed. It is written before its step is
committed, so the service's next step always has one; the checkpoint of a failed commit is unused and later replaced. No
pickle.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file

from dora.data.strict_json import json_object
from dora.errors import InvalidValue
from dora.trainers.sharding import part_of
from dora.weights.files import header_of, write_weights
from dora.weights.reference import WEIGHTS_FILE

OPTIMIZER_FILE: Final = "optimizer.safetensors"
STATE_FILE: Final = "trainer.json"
REPLAY_FILE: Final = "replay.bin"
KEPT: Final = 2  # one of the last commit, and one of the next
_PREFIX: Final = "step-"


@dataclass(frozen=True, slots=True)
class CheckpointPosition:
    step: int  # the next step
    reference_version: int


def save(
    folder: Path,
    position: CheckpointPosition,
    weights: Mapping[str, torch.Tensor],
    moments: Mapping[str, torch.Tensor],
    config: Any,
    replay: bytes = b"",
) -> Path:
    """Writes one checkpoint, as :func:`written`. ``config`` is transformers'.

    Raises InvalidValue for weights that are not finite, OSError if writing fails.
    """
    with written(folder, position, replay) as unfinished:
        for name, tensors in ((WEIGHTS_FILE, weights), (OPTIMIZER_FILE, moments)):
            write_weights(unfinished / name, tensors, {key: header_of(key, each) for key, each in tensors.items()})
        config.save_pretrained(unfinished)
    return path_of(folder, position.step)


@contextmanager
def written(folder: Path, position: CheckpointPosition, replay: bytes = b"") -> Iterator[Path]:
    """A folder for writing one checkpoint; it gets its name at the end unless an exception was raised.

    ``replay`` is the content of a replay buffer, or empty. The folder replaces a checkpoint of the same step.
    Checkpoints older than the last :data:`KEPT` are removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = path_of(folder, position.step)
    unfinished = folder / f".{target.name}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    yield unfinished
    if replay:
        (unfinished / REPLAY_FILE).write_bytes(replay)
    (unfinished / STATE_FILE).write_text(json.dumps(asdict(position)))
    for file in unfinished.iterdir():
        _sync(file)
    shutil.rmtree(target, ignore_errors=True)
    os.rename(unfinished, target)
    _sync(folder)
    for step in steps_in(folder)[:-KEPT]:
        shutil.rmtree(path_of(folder, step))


def steps_in(folder: Path) -> list[int]:
    """The steps that have a checkpoint, ascending; empty if there is no such folder."""
    names = [each.name.removeprefix(_PREFIX) for each in folder.glob(f"{_PREFIX}*")]
    return sorted(int(name) for name in names if name.isdecimal())


def path_of(folder: Path, step: int) -> Path:
    return folder / f"{_PREFIX}{step}"


def position_of(checkpoint: Path) -> CheckpointPosition:
    """Returns a checkpoint's position. Raises InvalidValue if it is not a checkpoint."""
    found = json_object(checkpoint / STATE_FILE, "checkpoint")
    try:
        return CheckpointPosition(int(found["step"]), int(found["reference_version"]))
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidValue(f"checkpoint: {STATE_FILE}", found, "step and reference_version, both integers") from error


def read_moments(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / OPTIMIZER_FILE)


def read_replay(checkpoint: Path, step: int) -> bytes:
    """Returns the content of a replay buffer for ``step``, or nothing if the checkpoint has no such one.

    Groups of an older checkpoint may have been replayed in the steps between.
    """
    file = checkpoint / REPLAY_FILE
    return file.read_bytes() if file.is_file() and position_of(checkpoint).step == step else b""


def moments_of(module: Any, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the optimiser's state as "NAME/exp_avg" and so on, by the parameters' names in ``module``."""
    for name, parameter in module.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            yield f"{name}/{key}", value


def set_moments(module: Any, optimizer: torch.optim.Optimizer, moments: Mapping[str, torch.Tensor]) -> None:
    """Sets the moments, or this rank's parts if ``module`` is sharded. Raises InvalidValue for another model's."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, value in moments.items():
        found.setdefault(name.rpartition("/")[0], {})[name.rpartition("/")[2]] = value
    parameters = {name: each for name, each in module.named_parameters() if each.requires_grad}
    for name, values in found.items():
        shape = parameters[name].shape if name in parameters else None
        if any(each.shape not in ((), shape) for each in values.values()):
            allowed = f"of shape {list(shape)}" if shape is not None else "those of a trained parameter"
            raise InvalidValue(
                f"checkpoint: moments of {name}", [list(each.shape) for each in values.values()], allowed
            )
        parameter = parameters[name]
        optimizer.state[parameter] = {
            key: part_of(each, parameter) if each.shape else each for key, each in values.items()
        }


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
