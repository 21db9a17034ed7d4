"""A worker of two ranks beside one of one rank: versions load, requests move, some are parked, and a rank is killed."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from dora.client import Operator
from dora.errors import Conflict, NotFound
from dora.host.command import LaunchContext, worker_argv, worker_environment
from dora.models.tiny import make_tiny
from dora.orchestrator.main import ServiceHandle
from dora.rpc import dora_pb2 as pb
from dora.rpc.roles import Role
from dora.trainers.grpo import train
from dora.trainers.learner import LearnerConfig
from dora.trainers.options import GrpoConfig
from tests.e2e.test_rollout import check_record
from tests.service import configured, during, park, running, until

pytestmark = [pytest.mark.e2e, pytest.mark.full]  # `make test` moves requests of ranks in tests/contract

GROUPS = 3
STEPS = 6
SLOTS = 16  # of each worker: two steps' requests fit, and so there is a free one to move to
PAIR, ALONE = "w0", "alone"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two KV heads: one for each of two ranks."""
    return make_tiny("dense", tmp_path / "model", kv_heads=2)


@asynccontextmanager
async def started_by_hand(handle: ServiceHandle, operator: Operator) -> AsyncIterator[None]:
    """A further worker, of one rank, once it is ready."""
    config = configured(handle.model, workers__slots=SLOTS).workers
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *worker_argv(config, ALONE, LaunchContext(handle.address, handle.model)),
        env={**os.environ, **worker_environment(config, handle.tokens[Role.WORKER])},
    )
    try:
        await until(operator, lambda status: any(worker.worker_id == ALONE for worker in status.workers))
        yield
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def pid_of(status: pb.Status, worker_id: str) -> int:
    """Returns the id of a worker's process; 0 if it is not connected."""
    return next((worker.pid for worker in status.workers if worker.worker_id == worker_id), 0)


def ranks_of(pid: int) -> list[int]:
    """The processes of a worker's ranks."""
    children = psutil.Process(pid).children()
    return [child.pid for child in children if "resource_tracker" not in " ".join(child.cmdline())]


async def move_both_ways(operator: Operator) -> None:
    """Moves requests as an operator does until one has moved each way with its KV, and has decoded there."""
    asked: dict[str, tuple[str, str]] = {}  # the latest move of each
    arrived: dict[str, int] = {}  # tokens of each when it was first seen at its target
    moved: set[tuple[str, str]] = set()
    async for status in operator.watch(period_ms=50):
        hosts = {worker.worker_id: worker.version for worker in status.workers if worker.state == "ready"}
        listed = (await operator.trajectories("running", limit=1000)).trajectories
        for request in listed:
            ways = asked.get(request.trajectory_id)
            if not ways or ways[1] != request.worker:
                continue
            if request.tokens > arrived.setdefault(request.trajectory_id, request.tokens):
                moved.add(ways)
        if {(PAIR, ALONE), (ALONE, PAIR)} <= moved:
            return
        for request in sorted(listed, key=lambda request: request.tokens):
            ways = (request.worker, ALONE if request.worker == PAIR else PAIR)
            if ways in moved or request.trajectory_id in asked or hosts.get(ways[1]) != request.version:
                continue
            with contextlib.suppress(Conflict, NotFound):  # it has ended or changed hands since
                await operator.migrate(request.trajectory_id, ways[1])
                asked[request.trajectory_id] = ways
                break


async def test_two_ranks_load_decode_move_and_lose_one(model: Path, tmp_path: Path) -> None:
    record = tmp_path / "record"
    fields = {
        "workers__count": 1,
        "workers__tensor_parallel": 2,
        "workers__slots": SLOTS,
        "kv__pool_mb": 64,
        "window__size": 2,
        "rollout__max_tokens": 96,
        "rollout__temperature": 0.9,
        "rollout__top_p": 0.95,
        "rollout__frequency_penalty": 0.2,
        "rollout__repetition_penalty": 1.05,
        "balance__period_s": 1.0,
    }
    async with (
        running(configured(model, record=str(record), **fields)) as handle,
        Operator(handle.address, handle.token) as operator,
        started_by_hand(handle, operator),
    ):
        config = GrpoConfig(
            handle.address, handle.token, groups=GROUPS, steps=STEPS, learner=LearnerConfig(learning_rate=1e-3)
        )
        training = asyncio.create_task(train(config))
        await during(training, move_both_ways(operator))
        await during(training, park(operator, 2, PAIR))
        status = await operator.status()
        ranks = {worker.worker_id: (worker.tensor_parallel, worker.pipeline_parallel) for worker in status.workers}
        assert ranks == {PAIR: (2, 1), ALONE: (1, 1)}
        assert status.counters["migrations_kv"] > 1
        assert status.counters["tokens_reprefilled"] == status.counters["parked_lost"] == 0
        pid = pid_of(status, PAIR)
        survivor, victim = ranks_of(pid)
        os.kill(victim, signal.SIGKILL)
        report = await training
        counters = (await until(operator, lambda status: pid_of(status, PAIR) != pid)).counters
        assert not psutil.pid_exists(survivor), "it ends with the worker's process, which was not asked to leave"
    assert counters["workers_lost"] == 1
    assert counters["groups_lost"] == counters["c1_violations"] == 0
    assert counters["versions_live_max"] == 2
    assert counters["staleness_max"] <= 1
    assert len(report.steps) == STEPS
    check_record(record, report, GROUPS)
