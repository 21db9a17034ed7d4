"""Proves on any device that a reload in place reaches every kind of tensor and leaves nothing of an earlier version.

An engine may keep derived copies of weights (packed, transposed, quantised, in a CUDA graph) that a reload must renew.
The proof loads a version, then the version with one kind of tensor changed, for each kind, then the version again. The
canary must change with each kind by more than the noise of equal scores, and must be the same at both ends but for that
noise, which is 0 for kernels that sum in a fixed order. It does not find wrong arithmetic, which
the published canary does.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

import torch

_FACTOR: Final = 1.5  # exact in every floating-point format, and not cancelled by a second changed tensor
# The first of these that occurs in a tensor's name is its kind.
_KINDS: Final[Mapping[str, str]] = {
    "lm_head": "head",
    "embed": "head",
    ".experts.": "experts",
    "norm": "norms",
    "attn": "attention",
    "mlp": "mlp",
}
OTHERS: Final = "others"


def kind_of(name: str) -> str:
    return next((kind for part, kind in _KINDS.items() if part in name), OTHERS)


def kinds(names: Iterable[str]) -> list[str]:
    return sorted({kind_of(name) for name in names})


def changed(
    tensors: Iterable[tuple[str, torch.Tensor]], kind: str, token_ids: Collection[int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors, those of one kind changed.

    ``token_ids`` are the canary's. Rows of the head for these tokens stay, so a head that is tied to the embedding
    changes the canary only by its own logits.
    """
    for name, tensor in tensors:
        if kind_of(name) != kind or not tensor.is_floating_point():
            yield name, tensor
            continue
        scaled = tensor * _FACTOR
        if kind == "head" and tensor.dim() == 2:
            rows = sorted(set(token_ids))
            scaled[rows] = tensor[rows]
        yield name, scaled
