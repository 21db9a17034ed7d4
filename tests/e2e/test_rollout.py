"""Whole runs on real engines: the service, a trainer that takes gradient steps, deaths; every logprob verified.

A mixture of experts is run here, and a worker of two ranks in ``test_ranks.py``.
"""

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
from dora.ops.verify import verify
from dora.ops.verify.check import read_trajectories
from dora.orchestrator.main import ServiceHandle
from dora.trainers.grpo import train
from dora.trainers.learner import Learner, LearnerConfig
from dora.trainers.options import GrpoConfig
from dora.trainers.report import TrainerReport
from tests.service import configured, during, move_one, running, until
from tests.sweeps import counts_of

pytestmark = pytest.mark.e2e

GROUPS = 6
STEPS = counts_of(3, 6)
LEARNER = LearnerConfig(learning_rate=1e-3)
ROUNDING = replace(LEARNER, autocast=True)  # its own routers choose otherwise than the engine's
SETTINGS = {
    "window__size": 2,
    "workers__router_replay": True,
    "rollout__max_tokens": 128,
    "rollout__ignore_eos": True,
    "rollout__temperature": 0.9,
    "rollout__top_p": 0.95,
    "rollout__frequency_penalty": 0.2,
    "rollout__repetition_penalty": 1.05,
    "balance__period_s": 1.0,
}


def trainer_of(handle: ServiceHandle, learner: LearnerConfig, steps: int) -> GrpoConfig:
    return GrpoConfig(handle.address, handle.token, groups=GROUPS, steps=steps, learner=learner)


def check_record(folder: Path, report: TrainerReport, groups: int = GROUPS) -> None:
    """Everything trained is in the record once, and every logprob is that of the recorded version's weights."""
    trained = [group_id for step in report.steps for group_id in step.group_ids]
    assert len(trained) == len(set(trained)) == len(report.steps) * groups
    found = verify(folder, atol=1e-3, window_versions=2)
    assert found.ok, found.violations
    assert found.trajectories >= len(trained)
    assert len(found.versions) > 1


def first_step(record: Path, report: TrainerReport) -> list[TrajectoryGroup]:
    """The groups that it trained on: the initial weights, which its trainer had too, sampled them."""
    members: defaultdict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in read_trajectories(record / "trajectories.jsonl"):
        members[trajectory.group_id].append(trajectory)
    return [
        TrajectoryGroup(group_id, tuple(sorted(members[group_id], key=lambda each: each.sample_index)))
        for group_id in report.steps[0].group_ids
    ]


def gap(model: Path, groups: list[TrajectoryGroup], replays: bool) -> float:
    """Mean difference of recorded logprobs and of a trainer's that has the weights they were sampled with."""
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    learner = Learner(module, replace(ROUNDING, router_replay=replays))
    for group in groups:
        learner.add_group(group)
    return learner.finish_step().signals.logprob_gap


@pytest.mark.parametrize("steps", STEPS)
async def test_requests_move_a_worker_dies_and_a_trainer_sends_tokens_where_the_engine_did(
    tiny_moe: Path, tmp_path: Path, steps: int
) -> None:
    """The worker is killed in the first step, while requests move.

    The gap of logprobs that router replay leaves in that step is that of rounding, also for those of the dead worker.
    """
    record = tmp_path / "record"
    async with (
        running(configured(tiny_moe, record=str(record), **SETTINGS)) as handle,
        Operator(handle.address, handle.token) as operator,
    ):
        training = asyncio.create_task(train(trainer_of(handle, ROUNDING, steps)))
        status = await during(training, until(operator, lambda status: status.counters["tokens_generated"] > 0))
        await during(training, move_one(operator, and_begin_another=True))
        counters = (await operator.status()).counters
        assert counters["migrations_kv"] > 0
        assert counters["tokens_reprefilled"] == 0, "what moves brings its KV"
        os.kill(next(worker.pid for worker in status.workers if worker.worker_id == "w1"), signal.SIGKILL)
        report = await training
        counters = (await operator.status()).counters
    assert counters["workers_lost"] == 1
    assert counters["versions_live_max"] == 2
    assert counters["staleness_max"] <= 1
    assert counters["groups_lost"] == counters["c1_violations"] == 0
    check_record(record, report)

    first = first_step(record, report)
    arrivals = {part.arrival for group in first for each in group.trajectories for part in each.worker_history}
    assert "re-prefilled" in arrivals
    replayed, without = gap(tiny_moe, first, replays=True), gap(tiny_moe, first, replays=False)
    assert report.steps[0].metrics.signals.logprob_gap == pytest.approx(replayed, rel=1e-3)
    assert replayed < 0.8 * without


@pytest.mark.full
async def test_the_real_model(smollm2: Path, tmp_path: Path) -> None:
    """SmolLM2-135M on reasoning-gym prompts; of three steps, the last trains on what version 1 sampled."""
    fields = {
        "prompts": "reasoning-gym:spell_backward",
        "rollout__group_size": 2,
        "rollout__max_tokens": 16,
        "workers__max_model_len_tokens": 256,
        "workers__kv_tokens": 4096,
    }
    async with running(configured(smollm2, record=str(tmp_path / "record"), **fields)) as handle:
        report = await train(replace(trainer_of(handle, LEARNER, steps=3), layers=4))
    check_record(tmp_path / "record", report)
