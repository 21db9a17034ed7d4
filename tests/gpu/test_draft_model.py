"""A draft model on a GPU. Needs torch with CUDA and transformers, and no vLLM."""

import random
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from dora.models.tiny import make_tiny
from dora.worker.drafting.draft_model import DraftModel

pytestmark = pytest.mark.gpu
TOLERANCE = 1e-3  # of a logit in float32
TOKENS = 4  # of a draft
HAS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU")


def logits_of(
    model: DraftModel, requests: Sequence[tuple[str, "array[int]"]], chosen: Sequence[list[int]]
) -> list[torch.Tensor]:
    """Drafts the chosen tokens, and returns the logits before each of them."""
    found: list[torch.Tensor] = []

    def choose(logits: torch.Tensor, number: int) -> list[int]:
        found.append(logits)
        return chosen[number]

    model.follow(requests)
    model.draft(requests, TOKENS, choose)
    return found


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=HAS_GPU)])
def test_its_logits_are_those_on_a_cpu(device: str, tmp_path: Path) -> None:
    """Of requests that gain tokens, go beyond the window, and lose their rows to others."""
    folder, chance = make_tiny("dense", tmp_path / "model", seed=3), random.Random(1)
    on_cpu, other = (DraftModel(folder, "float32", 2, 80, 1 << 20, each) for each in ("cpu", device))
    requests = {name: array("i", [chance.randrange(3, 60) for _ in range(60)]) for name in "abc"}
    for _ in range(12):
        drafted = [(name, requests[name]) for name in chance.sample("abc", 2)]
        drafts = [[chance.randrange(3, 60) for _ in drafted] for _ in range(TOKENS)]
        expected, found = (logits_of(each, drafted, drafts) for each in (on_cpu, other))
        for theirs, ours in zip(expected, found, strict=True):
            assert ours.device.type == device
            assert (ours.cpu() - theirs).abs().max() < TOLERANCE
        for row, (_, token_ids) in enumerate(drafted):
            token_ids.extend(draft[row] for draft in drafts[: chance.randrange(1, TOKENS + 1)])
