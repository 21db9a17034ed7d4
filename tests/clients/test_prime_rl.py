"""``examples/prime_rl_batches.py`` on a service, up to prime-rl's own packing: prime-rl is in no package index."""

import asyncio
import threading
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.prime_rl_batches import samples_of, train, until
from tests.contract.trainer_service import TOKEN, StartService, make_group

FIELDS = ("token_ids", "mask", "logprobs", "temperatures", "advantages")


def test_samples_are_aligned_to_the_tokens() -> None:
    samples = list(samples_of(make_group(0, 0), "other"))
    assert [sample["env_name"] for sample in samples] == ["toy", "toy"]
    for index, sample in enumerate(samples):
        tokens = [1, 2, *range(10, 13 + index)]
        assert {len(sample[name]) for name in FIELDS} == {len(tokens)}
        assert sample["token_ids"] == tokens and sample["mask"] == [False] * 2 + [True] * (3 + index)
        assert sample["logprobs"][:2] == sample["advantages"][:2] == [0.0, 0.0]
        assert sample["logprobs"][2] == pytest.approx(-0.1) and sample["logprobs"][-1] == pytest.approx(-2.0)
        assert set(sample["advantages"][2:]) == {sample["advantages"][2]}
    assert samples[0]["advantages"][2] < 0 < samples[1]["advantages"][2]


class Ranks(threading.Thread):
    """Offers policies in the folder of a run, as prime-rl's trainer does: one to begin with, one after each batch."""

    def __init__(self, folder: Path, weights: dict[str, torch.Tensor], steps: int) -> None:
        super().__init__(daemon=True)
        self.folder, self.weights, self.steps = folder, weights, steps

    def run(self) -> None:
        for step in range(self.steps + 1):
            offered = self.folder / "broadcasts" / f"step_{step}"
            offered.mkdir(parents=True)
            (offered / ".sender_ready").touch()
            until(offered / ".receiver_ready")
            scaled = {name: tensor * (1.0 + step / 8) for name, tensor in self.weights.items()}
            save_file(scaled, offered / "model-00001-of-00001.safetensors")
            (offered / ".finished").touch()


async def test_policies_that_the_trainer_offers_become_versions(
    start_service: StartService, tmp_path: Path, tiny_dense: Path
) -> None:
    """Five groups, of which the third step of two is short."""
    service = await start_service(tmp_path / "store", tiny_dense, total_groups=5)
    base = load_file(tiny_dense / "model.safetensors")
    ranks, sent = Ranks(tmp_path / "run", base, 3), list[tuple[int, int]]()
    ranks.start()
    options = Namespace(address=service.address, folder=ranks.folder, groups=2, steps=0, task="dora")
    await asyncio.to_thread(train, options, TOKEN, lambda step: lambda rows: sent.append((step, len(rows))))
    ranks.join()
    assert sent == [(1, 4), (1, 4), (1, 2)]
    assert [commit.version for commit in service.service.commits] == [1, 2, 3]
    for version in (1, 2, 3):
        found = load_file(service.service.store.folder(version) / "model.safetensors")
        assert all(torch.equal(found[name], (base[name] * (1.0 + version / 8)).to(found[name].dtype)) for name in base)
