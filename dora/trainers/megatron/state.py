"""One rank's optimiser in a checkpoint, ``optimizer-rank00003.safetensors``, for the same rank of the same layout.

2.0.17/value        the float32 tensor that it steps on, if the model's own has lower precision
2.0.17/exp_avg      and any other state of it
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open

from dora.errors import MISSING, Conflict
from dora.trainers.megatron.part import Part
from dora.weights.files import header_of, write_weights

_VALUE: Final = "value"


def save_states(part: Part, folder: Path) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for name, states, tensor in part.states():
        tensors[f"{name}/{_VALUE}"] = tensor.detach()
        tensors |= {f"{name}/{key}": torch.as_tensor(value) for key, value in states.items()}
    if tensors:
        write_weights(folder / _file(part), tensors, {name: header_of(name, each) for name, each in tensors.items()})
    if part.built.place.rank == 0:
        (folder / "megatron.json").write_text(json.dumps(_layout(part)))


def load_states(part: Part, folder: Path, *, values: bool) -> None:
    """Loads the output of :func:`save_states`. With ``values``, the model's weights are from this checkpoint, too.

    Raises Conflict if the checkpoint was written in another layout.
    """
    file = folder / "megatron.json"
    found = json.loads(file.read_text()) if file.is_file() else MISSING
    if found != _layout(part):
        why = "was written by other ranks, and can only be read in the same layout"
        raise Conflict(f"{folder.name}: layout", str(found), str(_layout(part)), why)
    if not (folder / _file(part)).is_file():
        return
    with safe_open(folder / _file(part), framework="pt") as stream:
        kept: dict[str, dict[str, Any]] = {}
        for key in list(stream.keys()):
            kept.setdefault(key.partition("/")[0], {})[key.partition("/")[2]] = key
        for name, states, tensor in part.states():
            for key, whole in kept.get(name, {}).items():
                if key != _VALUE:
                    states[key] = stream.get_tensor(whole).to(tensor.device)
                elif values:
                    with torch.no_grad():
                        tensor.copy_(stream.get_tensor(whole))


def _file(part: Part) -> str:
    return f"optimizer-rank{part.built.place.rank:05d}.safetensors"


def _layout(part: Part) -> dict[str, Any]:
    place = part.built.place
    return {**asdict(place.layout), "world": place.world, "distributed_optimizer": part.distributed_optimizer}
