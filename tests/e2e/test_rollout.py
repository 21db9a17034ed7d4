"""Whole runs on real engines: the service, a trainer that takes gradient steps, deaths; every logprob verified."""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from dora.client import Operator
from dora.orchestrator.main import ServiceHandle
from dora.trainers.grpo import train
from dora.trainers.learner import LearnerConfig
from dora.trainers.options import GrpoConfig
from dora.trainers.report import Report
from dora.verify import verify
from tests.service import configured, during, move_one, running, until

pytestmark = pytest.mark.e2e

GROUPS = 6
STEPS = 6
TINY = {
    "window__size": 2,
    "rollout__max_tokens": 96,
    "rollout__temperature": 0.9,
    "rollout__top_p": 0.95,
    "rollout__frequency_penalty": 0.2,
    "rollout__repetition_penalty": 1.05,
    "balance__period_s": 1.0,
}


def trainer_of(handle: ServiceHandle, steps: int = STEPS) -> GrpoConfig:
    learner = LearnerConfig(learning_rate=1e-3)
    return GrpoConfig(handle.address, handle.token, groups=GROUPS, steps=steps, learner=learner)


def check_record(folder: Path, report: Report) -> None:
    """Everything trained is in the record once, and every logprob is that of the recorded version's weights."""
    trained = [group_id for step in report.steps for group_id in step.group_ids]
    assert len(trained) == len(set(trained)) == len(report.steps) * GROUPS
    found = verify(folder, atol=1e-3, window_versions=2)
    assert found.ok, found.violations
    assert found.trajectories >= len(trained)
    assert len(found.versions) > 1


@pytest.mark.parametrize("kind", ["dense", "moe"])
async def test_two_versions_and_migrations(tiny_dense: Path, tiny_moe: Path, tmp_path: Path, kind: str) -> None:
    model = tiny_dense if kind == "dense" else tiny_moe
    async with (
        running(configured(model, record=str(tmp_path / "record"), **TINY)) as handle,
        Operator(handle.address, handle.token) as operator,
    ):
        training = asyncio.create_task(train(trainer_of(handle)))
        await during(training, move_one(operator))
        report = await training
        counters = (await operator.status()).counters
    assert counters["versions_live_max"] == 2
    assert counters["staleness_max"] <= 1
    assert counters["migrations_kv"] > 0
    assert counters["tokens_reprefilled"] == counters["groups_lost"] == counters["c1_violations"] == 0
    check_record(tmp_path / "record", report)


@pytest.mark.parametrize(("victim", "moment"), [("w0", "in the first step"), ("w1", "while requests move")])
async def test_kill_9_costs_no_sample(tiny_dense: Path, tmp_path: Path, victim: str, moment: str) -> None:
    async with (
        running(configured(tiny_dense, record=str(tmp_path / "record"), **TINY)) as handle,
        Operator(handle.address, handle.token) as operator,
    ):
        training = asyncio.create_task(train(trainer_of(handle)))
        status = await during(training, until(operator, lambda status: status.counters["tokens_generated"] > 0))
        if moment == "while requests move":
            await during(training, move_one(operator, and_begin_another=True))
        os.kill(next(worker.pid for worker in status.workers if worker.worker_id == victim), signal.SIGKILL)
        report = await training
        counters = (await operator.status()).counters
    assert counters["workers_lost"] == 1
    assert counters["groups_lost"] == counters["c1_violations"] == 0
    assert counters["staleness_max"] <= 1
    check_record(tmp_path / "record", report)


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
        report = await train(replace(trainer_of(handle, steps=3), layers=4))
    check_record(tmp_path / "record", report)
