"""One rank's part of a checkpoint: read from a Hugging Face folder, and written into files of its own.

Tensor-parallel ranks take turns in gathering parameters, so all of them write. Experts are written by the ranks that
have them. The first of the data-parallel copies writes.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from dora.errors import MISSING, InvalidValue
from dora.trainers.megatron.architecture import Built
from dora.trainers.megatron.layout import group_of
from dora.trainers.megatron.names import Rule, cut, joined, rule_of
from dora.weights.files import header_of, published_header, write_weights
from dora.weights.reference import INDEX_FILE, TensorHeader, read_header, weight_files


def parameters_of(built: Built) -> Iterator[tuple[str, torch.nn.Parameter, Rule]]:
    """This rank's parameters, in the same order on all ranks of a tensor-parallel group."""
    for name, parameter in built.module.named_parameters():
        yield name, parameter, rule_of(name, built.first_layer, built.first_expert, built.architecture.shape)


def load(built: Built, folder: Path) -> None:
    """Fills this rank's parameters from a Hugging Face folder. Raises InvalidValue if one is missing or misshapen."""
    files = {name: folder / file for file in weight_files(folder) for name in read_header(folder / file)}
    shape, layout = built.architecture.shape, built.place.layout
    with torch.no_grad():
        for name, parameter, rule in parameters_of(built):
            found = {each: _read(files, each, folder) for each in rule.names}
            rank, ranks = (built.place.etp, layout.etp) if rule.of_expert else (built.place.tp, layout.tp)
            own = cut(rule, found, rank, ranks, shape)
            if own.shape != parameter.shape:
                read = " and ".join(rule.names)
                raise InvalidValue(f"{read}: shape", list(own.shape), f"{list(parameter.shape)}, as {name}")
            parameter.copy_(own)


def _read(files: Mapping[str, Path], name: str, folder: Path) -> torch.Tensor:
    if name not in files:
        raise InvalidValue(f"{folder}: {name}", MISSING, "a tensor of the model")
    with safe_open(files[name], framework="pt") as stream:
        return stream.get_tensor(name)


def tensors_of(built: Built) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the checkpoint's tensors that this rank writes. All ranks must iterate over it together."""
    shape, place = built.architecture.shape, built.place
    for index, (_, parameter, rule) in enumerate(parameters_of(built)):
        if not rule.published:
            continue
        group, rank = (group_of("etp"), place.etp) if rule.of_expert else (group_of("tp"), place.tp)
        writer = index % group.size()
        shards = _gathered(parameter.detach(), rule, group, writer)
        is_copy = place.expert_dp > 0 if rule.of_expert else place.dp > 0 or place.cp > 0
        if rank == writer and not is_copy:
            yield from joined(rule, shards, shape).items()


def _gathered(own: torch.Tensor, rule: Rule, group: Any, writer: int) -> list[torch.Tensor]:
    """Gathers the shards of a parameter on each rank of ``group`` at ``writer``. It is meaningless elsewhere."""
    if rule.cut == "whole" or group.size() == 1:
        return [own]
    found = [torch.empty_like(own) for _ in range(group.size())] if group.rank() == writer else None
    dist.gather(own.contiguous(), found, dst=dist.get_global_rank(group, writer), group=group)
    return found or []


def write(built: Built, folder: Path, expected: Mapping[str, TensorHeader]) -> tuple[str, list[str]]:
    """Writes this rank's tensors as a file of its own, in the dtypes of ``expected``; no file if there are none.

    All ranks must call it together. Tensors are copied to host memory one by one and stay there until the file, which
    begins with its header, is written. Returns the file's name and the tensors'. Raises InvalidValue for a tensor that
    is not finite.
    """
    file = f"model-rank{built.place.rank:05d}.safetensors"
    tensors = {name: tensor.to("cpu") for name, tensor in tensors_of(built)}
    if tensors:
        found = {name: published_header(header_of(name, each), expected.get(name)) for name, each in tensors.items()}
        write_weights(folder / file, tensors, found)
    return file, list(tensors)


def write_index(folder: Path, files: Mapping[str, str]) -> None:
    """Writes the index that makes several files one checkpoint. ``files`` has the file of each tensor."""
    headers = [header for file in set(files.values()) for header in read_header(folder / file).values()]
    index = {"metadata": {"total_size": sum(each.content_bytes for each in headers)}, "weight_map": dict(files)}
    (folder / INDEX_FILE).write_text(json.dumps(index))


def prints_of(built: Built) -> dict[str, float]:
    """The squared norms of this rank's tensors, by names that are equal on all ranks with copies."""
    place = built.place
    found: dict[str, float] = {}
    for _, parameter, rule in parameters_of(built):
        part = f"expert rank {place.ep}.{place.etp}" if rule.of_expert else f"tensor rank {place.tp}"
        name = f"of stage {place.pp}, {part}"
        found[name] = found.get(name, 0.0) + float(parameter.detach().double().square().sum())
    return found
