"""Routed experts through a whole service with fake engines: a worker is killed, requests move, are parked, recorded."""

import asyncio
import os
import signal
from pathlib import Path

import dora
from dora.client import Operator
from dora.data.trajectory import Trajectory, TrajectoryGroup
from dora.data.types import RequestSpec
from dora.errors import Conflict, InvalidValue, NotFound
from dora.models import routing
from dora.verify.check import read_trajectories
from dora.worker.fake_engine import FakeEngine
from tests.contract.driver import run
from tests.refusals import refused
from tests.service import ask_move, check_promises, configured, during, running

GROUPS = 4
WINDOW = 2
ARRIVALS = {"migrated", "parked", "re-prefilled"}
KILLS_MAX = 3  # each costs a restart of a worker
LONG = {
    "workers__engine": "fake",
    "workers__router_replay": True,
    "rollout__ignore_eos": True,
    "rollout__max_tokens": 1000,
    "workers__max_model_len_tokens": 2048,
    "workers__kv_tokens": 16384,
    "kv__pool_mb": 64,
}


async def train(trainer: dora.Trainer, model: Path) -> list[list[TrajectoryGroup]]:
    """Until requests that arrived in each way were trained on."""
    steps: list[list[TrajectoryGroup]] = []
    seen: set[str] = set()
    async for step in trainer.steps(groups=GROUPS):
        steps.append([group async for group in step])
        seen |= {segment.arrival for each in taken([steps[-1]]) for segment in each.worker_history}
        if seen >= ARRIVALS:
            break
        await step.commit(weights=model, wait=True)
    return steps


def taken(steps: list[list[TrajectoryGroup]]) -> list[Trajectory]:
    return [each for step in steps for group in step for each in group.trajectories]


async def unsettle(operator: Operator) -> None:
    """Parks requests and moves others, and kills the busiest worker, until it is cancelled.

    A killed worker's requests may all have had a copy elsewhere, or have been cancelled: then another is killed.
    """
    killed: set[int] = set()
    async for status in operator.watch(period_ms=50):
        counters = status.counters
        unsettled = counters["migrations_kv"] and counters["requests_resumed"]
        settled = all(worker.state == "ready" and worker.pid not in killed for worker in status.workers)
        busiest = max(status.workers, key=lambda worker: worker.running)
        if unsettled and settled and busiest.running and len(killed) < KILLS_MAX:
            os.kill(busiest.pid, signal.SIGKILL)
            killed.add(busiest.pid)
        await ask_move(operator, status)
        if status.pools and status.pools[0].state == "ready":
            listed = (await operator.trajectories("running", limit=1000)).trajectories
            for request in sorted(listed, key=lambda request: request.tokens)[:2]:
                try:
                    await operator.migrate(request.trajectory_id, "pool-0")
                except (Conflict, NotFound):  # it has ended or changed hands since
                    continue


def check_alone(trajectories: list[Trajectory], model: Path) -> None:
    """Each has the rows that it has where nothing befalls it."""
    shape = routing(model)
    engine = FakeEngine(slots=64, kv_tokens=1 << 18, max_model_len_tokens=2048, model=model, router_replay=True)
    for version in sorted({each.behaviour_version for each in trajectories}):
        engine.load_weights(version, model, None)
        found = [each for each in trajectories if each.behaviour_version == version]
        requests = [
            RequestSpec(each.trajectory_id, version, tuple(each.prompt_token_ids.tolist()), each.sampling)
            for each in found
        ]
        alone = run(engine, requests)
        for trajectory in found:
            rows = trajectory.routed_experts
            assert rows is not None and rows.shape == (trajectory.routed_tokens, shape.layers, shape.top_k)
            assert rows.tobytes() == bytes(alone[trajectory.trajectory_id].routed_experts)


async def test_rows_are_those_of_the_first_sampling_whatever_befalls_a_request(tiny_moe: Path, tmp_path: Path) -> None:
    config = configured(tiny_moe, window__size=WINDOW, record=str(tmp_path / "record"), **LONG)
    async with (
        running(config, processes=True) as handle,
        Operator(handle.address, handle.token) as operator,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        unsettling = asyncio.create_task(unsettle(operator))
        steps = await during(unsettling, train(trainer, tiny_moe))
        unsettling.cancel()
        status = await operator.status()
    check_promises(steps, window=WINDOW, groups=GROUPS)
    assert status.counters["groups_lost"] == 0
    check_alone(taken(steps), tiny_moe)
    recorded = {each.trajectory_id: each for each in read_trajectories(tmp_path / "record" / "trajectories.jsonl")}
    for trajectory in taken(steps):
        again = recorded[trajectory.trajectory_id].routed_experts
        assert again is not None and trajectory.routed_experts is not None
        assert again.tobytes() == trajectory.routed_experts.tobytes()


async def test_a_dense_model_is_refused_before_anything_starts(tiny_dense: Path) -> None:
    with refused(InvalidValue, field="workers.router_replay", value=True):
        async with running(configured(tiny_dense, **LONG)):
            pass
