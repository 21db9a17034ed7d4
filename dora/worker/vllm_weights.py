"""Weights replaced in place, checked before anything is touched."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from dora.engine_patches import registry
from dora.weights.reference import Reference, TensorHeader, check_tensors, read_header, weight_files


def check_files(folder: Path, reference: Reference) -> tuple[Path, ...]:
    """The safetensors files of ``folder``, whose tensors are those of the model.

    Raises InvalidValue naming the first file or tensor that is missing, unknown, misshapen or of another dtype.
    """
    files = tuple(folder / name for name in weight_files(folder))
    found: dict[str, TensorHeader] = {}
    for file in files:
        found.update(read_header(file))
    check_tensors(found, reference.tensors)
    return files


def replace(runner: Any, files: Sequence[str]) -> None:
    """Loads one rank's part of checked files into its model, layer by layer, then repairs what vLLM leaves behind."""
    runner.reload_weights(weights_iterator=_tensors(files))
    registry.after_reload(runner.get_model())


def _tensors(files: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - a safetensors file is no mapping
                yield name, opened.get_tensor(name)
