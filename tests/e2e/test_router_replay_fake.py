"""Routed experts through a whole service with fake engines: requests move and are parked, sessions fork, a worker or
the orchestrator is killed, and all is recorded.
"""

import asyncio
import math
import os
import signal
from pathlib import Path

import pytest

import dora
from dora.client import Operator
from dora.client.sessions import Session
from dora.data.trajectory import Trajectory, TrajectoryGroup
from dora.data.types import RequestSpec, SamplingParams
from dora.errors import Conflict, InvalidValue, NotFound
from dora.models import routing
from dora.ops.verify.check import read_trajectories
from dora.ops.verify.invariants import violations
from dora.orchestrator.starting import ServiceHandle
from dora.worker.fake.engine import FakeEngine
from tests.contract.driver import run
from tests.e2e.test_sessions_fake import GROUP_SIZE, prompts_of, through_restarts
from tests.refusals import refused
from tests.service import ask_move, configured, during, running

GROUPS = 4
WINDOW = 1  # all workers host one version, so requests can move at any time
ARRIVALS = {"migrated", "parked", "re-prefilled"}
KILLS_MAX = 10  # each costs a restart of a worker
TOOL = [5, 6, 7]
LONG = {
    "workers__engine": "fake",
    "workers__router_replay": True,
    "rollout__ignore_eos": True,
    "rollout__max_tokens": 1000,
    "workers__max_model_len_tokens": 2048,
    "workers__kv_tokens": 16384,
    "kv__pool_mb": 64,
}


async def train(trainer: dora.Trainer, model: Path, kinds: set[bool]) -> list[list[TrajectoryGroup]]:
    """Until requests that arrived in each way were trained on: single answers (False) and sessions (True)."""
    steps: list[list[TrajectoryGroup]] = []
    seen: set[tuple[str, bool]] = set()
    async for step in trainer.steps(groups=GROUPS):
        steps.append([group async for group in step])
        for each in taken([steps[-1]]):
            seen |= {(segment.arrival, bool(each.events)) for segment in each.worker_history}
        if seen >= {(arrival, is_session) for arrival in ARRIVALS for is_session in kinds}:
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
    while True:  # by the present status: those of a watch wait behind the calls below on a busy machine
        status = await operator.status()
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


async def fork(session: Session) -> None:
    """Goes on, back to places of earlier turns, and begins a context of its own, from wherever another call was."""
    while session.turn.number < 5:
        match session.turn.number:
            case 1:
                await session.ask(TOOL, after_turn=0)  # a second continuation
            case 2:
                await session.ask(TOOL, first_token=2)
            case 3:
                await session.begin([9, 8, 7])
            case _:
                await session.ask(TOOL)
    await session.end(1.0)


async def drive(handle: ServiceHandle) -> None:
    """Of the submitted prompts every other one has sessions, the others have single answers."""
    own = ({"sampling": {"max_tokens": 200}}, {"environment": ""})
    async with dora.Prompts(handle.address, handle.token) as prompts:
        await prompts.submit([each | own[index % 2] for index, each in enumerate(prompts_of(200))])
    async with dora.Sessions(handle.address, handle.token) as sessions:
        await sessions.drive("tool", fork)


def check_alone(trajectories: list[Trajectory], model: Path) -> None:
    """Each has the rows that it has where nothing befalls it and its tokens are read at once."""
    shape = routing(model)
    engine = FakeEngine(slots=64, kv_tokens=1 << 18, max_model_len_tokens=2048, model=model, router_replay=True)
    for version in sorted({each.behaviour_version for each in trajectories}):
        engine.load_weights(version, model, None)
        found = [each for each in trajectories if each.behaviour_version == version]
        requests = [
            RequestSpec(
                each.trajectory_id,
                version,
                (*each.prompt_token_ids.tolist(), *each.response_token_ids[:-1].tolist()),
                SamplingParams(max_tokens=1),
            )
            for each in found
        ]
        alone = run(engine, requests)
        for trajectory in found:
            rows = trajectory.routed_experts
            assert rows is not None and rows.shape == (trajectory.routed_tokens, shape.layers, shape.top_k), trajectory
            assert rows.tobytes() == bytes(alone[trajectory.trajectory_id].routed_experts)


@pytest.mark.parametrize("with_sessions", [False, pytest.param(True, marks=pytest.mark.full)])
async def test_rows_are_those_of_the_first_sampling_whatever_befalls_a_request(
    tiny_moe: Path, tmp_path: Path, with_sessions: bool
) -> None:
    config = configured(tiny_moe, window__size=WINDOW, record=str(tmp_path / "record"), **LONG)
    async with (
        running(config, processes=True) as handle,
        Operator(handle.address, handle.token) as operator,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        unsettling = asyncio.create_task(unsettle(operator))
        driving = asyncio.create_task(drive(handle) if with_sessions else asyncio.sleep(math.inf))
        steps = await during(driving, during(unsettling, train(trainer, tiny_moe, {False, with_sessions})))
        unsettling.cancel()
        driving.cancel()
        status = await operator.status()
    assert status.counters["groups_lost"] == 0 and not list(violations(taken(steps), WINDOW))
    check_alone(taken(steps), tiny_moe)
    recorded = {each.trajectory_id: each for each in read_trajectories(tmp_path / "record" / "trajectories.jsonl")}
    for trajectory in taken(steps):
        again = recorded[trajectory.trajectory_id].routed_experts
        assert again is not None and trajectory.routed_experts is not None
        assert again.tobytes() == trajectory.routed_experts.tobytes()


@pytest.mark.full
async def test_sessions_keep_their_rows_where_the_orchestrator_is_killed(tiny_moe: Path, tmp_path: Path) -> None:
    """Its workers go on, and report what it had not written, with the rows of that."""
    steps = await through_restarts(
        tiny_moe, tmp_path, fork, prompts=2 * GROUPS, groups=GROUPS, steps=1, workers__router_replay=True
    )
    assert [each.branch_index for each in taken(steps)] == [0, 1, 2, 3] * GROUP_SIZE * GROUPS
    check_alone(taken(steps), tiny_moe)
    assert not list(violations(taken(steps), window_versions=2))


async def test_a_dense_model_is_refused_before_anything_starts(tiny_dense: Path) -> None:
    with refused(InvalidValue, field="workers.router_replay", value=True):
        async with running(configured(tiny_dense, **LONG)):
            pass
