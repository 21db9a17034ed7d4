"""``examples/grpo_loop.py``: its gradient is that of the reference trainer's objective, and it publishes over gRPC."""

import argparse
import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from dora.trainers.learner import Learner, LearnerConfig
from dora.trainers.objectives.presets import objective
from examples.grpo_loop import GRADIENT_NORM_MAX, micro_batches, policy_gradient, train
from tests.contract.trainer_service import TOKEN, StartService
from tests.unit.test_grpo import responses


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def options(address: str, **changes: Any) -> argparse.Namespace:
    values = {"groups": 2, "steps": 0, "rows": 16, "lr": 1e-3, "device": "cpu", "model": ""}
    return argparse.Namespace(address=address, **{**values, **changes})


@pytest.mark.parametrize("rows", [1, 2, 16])
def test_a_step_is_that_of_the_reference_trainer(tiny_dense: Path, rows: int) -> None:
    groups = [
        responses([[5, 6, 7], [8] * 5, [9]], [1.0, 0.0, float("nan")], logprob=-3.0),
        responses([[5, 6], [7]], [1.0, 1.0]),  # equal rewards: no signal
        responses([[5, 6], [7, 8, 9, 10]], [0.0, 2.0], logprob=-5.0),
    ]
    learner = Learner(load(tiny_dense), LearnerConfig(objective=objective("dapo"), grad_norm_max=GRADIENT_NORM_MAX))
    for group in groups:
        learner.add_group(group)
        learner.work()
    expected = learner.finish_step()

    model, tokens, loss = load(tiny_dense), 0, 0.0
    for group in groups:
        for batch in micro_batches(group, rows):
            part = policy_gradient(model, batch)
            part.backward()
            tokens += int(batch["mask"].sum())
            loss += part.item()
    norm = torch.nn.utils.get_total_norm([each.grad / tokens for each in model.parameters() if each.grad is not None])
    assert tokens == expected.signals.tokens_trained == 14
    assert loss / tokens == pytest.approx(expected.loss, abs=1e-5)
    assert float(norm) == pytest.approx(expected.grad_norm, rel=1e-4)


async def test_it_publishes_each_step_and_a_rejected_version_once_more(
    start_service: StartService, tmp_path: Path, tiny_dense: Path
) -> None:
    service = await start_service(tmp_path / "store", tiny_dense)
    service.service.faults.rejections = {1: 1}
    history = await asyncio.to_thread(train, options(service.address, steps=2), TOKEN)
    assert [step["tokens"] for step in history] == [2 * (3 + 4)] * 2
    assert [commit.version for commit in service.service.commits] == [1, 2]
    assert [each.version for each in service.service.republished] == [1]
    first, second = (load(service.service.store.folder(version)).state_dict() for version in (1, 2))
    assert any(not torch.equal(first[name], second[name]) for name in first)
