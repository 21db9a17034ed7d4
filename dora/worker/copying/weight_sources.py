"""The ways of weights from files to an engine, each with the deadline of its bytes."""

from collections.abc import Sequence
from pathlib import Path

import torch

from dora.engine_patches.mapped_weights import Source, Tensors, mapped_tensors
from dora.weights.load_time import LoadDeadline
from dora.weights.reference import read_layout
from dora.worker.copying.weight_ring import WeightRing


def mapped(files: Sequence[str], limit_s: float) -> Tensors:
    """Yields views of the files' pages: of a CPU, and of one of several ranks, whose part a layer's loader cuts out
    before anything is read.
    """
    deadline = _deadline(files, limit_s)
    for name, tensor in mapped_tensors(files):
        yield name, tensor
        deadline.loaded(tensor.nbytes)


def pinned(device: torch.device) -> Source:
    ring = WeightRing(device)

    def tensors(files: Sequence[str], limit_s: float) -> Tensors:
        yield from ring.tensors([Path(file) for file in files], _deadline(files, limit_s))

    return tensors


def _deadline(files: Sequence[str], limit_s: float) -> LoadDeadline:
    tensors = (tensor for file in files for tensor in read_layout(Path(file))[1])
    return LoadDeadline(limit_s, sum(tensor.content_bytes for tensor in tensors))
