"""Router replay from engine to optimiser: vLLM in fp32, a worker that dies, and a trainer in bfloat16."""

import asyncio
import os
import signal
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dora.client import Operator
from dora.data.trajectory import Trajectory, TrajectoryGroup
from dora.trainers.grpo import train
from dora.trainers.learner import Learner, LearnerConfig
from dora.trainers.options import GrpoConfig
from dora.verify.check import read_trajectories
from tests.service import configured, during, running, until

pytestmark = pytest.mark.e2e

GROUPS = 6
LEARNER = LearnerConfig(learning_rate=1e-3, autocast=True)  # it rounds, so its own routers choose otherwise
SETTINGS = {
    "workers__router_replay": True,
    "rollout__max_tokens": 96,
    "rollout__ignore_eos": True,
}


def gap(model: Path, groups: list[TrajectoryGroup], replays: bool) -> float:
    """Mean difference of recorded logprobs and of a trainer's that has the weights they were sampled with."""
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    learner = Learner(module, replace(LEARNER, router_replay=replays))
    for group in groups:
        learner.add_group(group)
    return learner.finish_step().signals.logprob_gap


async def test_a_trainer_sends_tokens_where_the_engine_did_also_those_of_a_dead_worker(
    tiny_moe: Path, tmp_path: Path
) -> None:
    """Its first step has the weights that sampled, so the gap that router replay leaves is that of rounding."""
    async with (
        running(configured(tiny_moe, record=str(tmp_path / "record"), **SETTINGS)) as handle,
        Operator(handle.address, handle.token) as operator,
    ):
        config = GrpoConfig(handle.address, handle.token, groups=GROUPS, steps=2, learner=LEARNER)
        training = asyncio.create_task(train(config))
        status = await during(training, until(operator, lambda status: status.counters["tokens_generated"] > 200))
        os.kill(status.workers[0].pid, signal.SIGKILL)
        report = await training
        counters = (await operator.status()).counters
    assert counters["workers_lost"] == 1
    assert counters["groups_lost"] == counters["c1_violations"] == 0

    members: defaultdict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in read_trajectories(tmp_path / "record" / "trajectories.jsonl"):
        members[trajectory.group_id].append(trajectory)
    first = [
        TrajectoryGroup(group_id, tuple(sorted(members[group_id], key=lambda each: each.sample_index)))
        for group_id in report.steps[0].group_ids
    ]
    arrivals = {part.arrival for group in first for each in group.trajectories for part in each.worker_history}
    assert "re-prefilled" in arrivals
    replayed, without = gap(tiny_moe, first, replays=True), gap(tiny_moe, first, replays=False)
    assert report.steps[0].metrics.signals.logprob_gap == pytest.approx(replayed, rel=1e-3)
    assert replayed < 0.8 * without
