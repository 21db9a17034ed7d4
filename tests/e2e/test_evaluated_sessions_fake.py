"""Evaluations of sessions beside training, with fake engines: one version, the environment's reward, no step."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import dora
from dora.client import Evaluation, Operator, score_of
from dora.client.sessions import Session
from dora.data.trajectory import TrajectoryGroup
from dora.errors import NotFound
from dora.ops.view.evaluation import evaluation_line
from tests.e2e.restarts import Killed, settings_of
from tests.e2e.test_router_replay_fake import check_alone, fork
from tests.e2e.test_sessions_fake import (
    GROUP_SIZE,
    GROUPS,
    check_session,
    check_sessions,
    config_of,
    drive,
    prompts_of,
    several_turns,
)
from tests.refusals import refused
from tests.service import during, running, until

SAMPLING = {"temperature": 0.5, "max_tokens": 6}
HELD_OUT = "tests.unit.environment_classes:HeldOut"


def held_out(count: int, **fields: Any) -> list[dict[str, Any]]:
    return [{**each, "prompt_id": f"held-{each['prompt_id']}", **fields} for each in prompts_of(count)]


def check_evaluation(evaluation: Evaluation, asked: int) -> None:
    """All sessions came once and whole, of one version and with their sampling."""
    assert (evaluation.reason, evaluation.missing, evaluation.refused) == ("", 0, {})
    assert len(evaluation.groups) == asked
    for group in evaluation.groups:
        assert [each.sample_index for each in group.trajectories] == [*range(GROUP_SIZE)]
        for each in group.trajectories:
            check_session(each)
            assert (each.behaviour_version, each.sampling.temperature) == (evaluation.version, 0.5)
            sampled = each.loss_mask.sum()
            assert sampled <= SAMPLING["max_tokens"] * (len(each.events) + 1), "the limit holds for each turn"


@pytest.mark.full
async def test_sessions_are_evaluated_beside_training_and_a_worker_dies(tiny_dense: Path) -> None:
    evaluated: set[str] = set()
    trained: set[str] = set()

    async def driver(session: Session) -> None:
        (evaluated if session.is_evaluation else trained).add(session.prompt_id)
        await several_turns(session)

    async with (
        running(config_of(tiny_dense), processes=True) as handle,
        dora.Prompts(handle.address, handle.token) as prompts,
        dora.Trainer(handle.address, token=handle.token) as trainer,
        Operator(handle.address, handle.token) as operator,
    ):
        await prompts.submit(prompts_of(5 * GROUPS))
        driving = asyncio.create_task(drive(handle, driver))
        steps: list[list[TrajectoryGroup]] = []

        async def training() -> None:
            async for step in trainer.steps(groups=GROUPS):
                if step.number == 1:
                    both = [prompts.evaluate(held_out(12, sampling=SAMPLING), share=share) for share in (0.3, 0.0)]
                    kinds = [asyncio.create_task(each.whole()) for each in both]
                    status = await until(operator, lambda status: any(each.running for each in status.evaluations))
                    os.kill(status.workers[0].pid, signal.SIGKILL)
                steps.append([group async for group in step])
                if step.number == 1:
                    for evaluation in await asyncio.gather(*kinds):
                        check_evaluation(evaluation, 12)
                        assert score_of(evaluation.groups).responses == 12 * GROUP_SIZE
                        assert evaluation.version == 1
                await step.commit(weights=handle.model, wait=True)
                if step.number == 3:
                    return

        await during(driving, training())
        status = await until(operator, lambda status: not status.evaluations)
        driving.cancel()
    check_sessions(steps)
    assert evaluated == {f"held-p{n}" for n in range(12)} and not evaluated & trained
    assert not {group.prompt_id for step in steps for group in step} & evaluated
    assert status.counters["c1_violations"] == status.counters["groups_lost"] == 0
    assert status.counters["trajectories_evaluated"] == 2 * 12 * GROUP_SIZE


async def test_a_failing_environment_and_forks(tiny_dense: Path) -> None:
    """A replaced session fails again: it has no valid reward. One that forked is one response."""

    async def driver(session: Session) -> None:
        if session.prompt_id == "held-p0":
            raise OSError("its sandbox died")
        if not len(session.prompt_token_ids):
            await session.begin([5, 6, 7])
        await session.ask([8, 9])
        await session.ask([9], after_turn=1, first_token=1)
        await session.end(2.0)

    async with (
        running(config_of(tiny_dense, sessions__replacements=1)) as handle,
        dora.Prompts(handle.address, handle.token) as prompts,
    ):
        asked = held_out(3)
        asked[2] = {"prompt_id": "held-p2", "environment": "tool", "group_size": 2, "text": ""}  # it brings its prompt
        driving = asyncio.create_task(drive(handle, driver))
        evaluation = await during(driving, prompts.evaluate(asked).whole())
        driving.cancel()
    assert not evaluation.reason and not evaluation.refused
    by_prompt = {group.prompt_id: group.trajectories for group in evaluation.groups}
    assert [each.trajectory_id.partition("~")[2] for each in by_prompt["held-p0"]] == ["1"] * GROUP_SIZE
    assert all("its sandbox died" in each.verifier_log and not each.reward_valid for each in by_prompt["held-p0"])
    for name in ("held-p1", "held-p2"):
        assert max(each.branch_index for each in by_prompt[name]) > 0
    score = score_of(evaluation.groups)
    assert (score.responses, score.verdicts_failed, score.reward_mean) == (3 * GROUP_SIZE, GROUP_SIZE, 2.0)


@pytest.mark.full
async def test_an_evaluation_that_is_left_ends_its_sessions(tiny_dense: Path) -> None:
    begun: asyncio.Queue[Session] = asyncio.Queue()

    async def driver(session: Session) -> None:
        begun.put_nowait(session)
        await asyncio.Event().wait()

    async with (
        running(config_of(tiny_dense)) as handle,
        dora.Prompts(handle.address, handle.token) as prompts,
        Operator(handle.address, handle.token) as operator,
    ):
        driving = asyncio.create_task(drive(handle, driver))
        evaluation = await prompts.evaluate(held_out(2)).begun()
        before = await during(driving, begun.get())
        driving.cancel()  # another caller gets the sessions that wait
        driving = asyncio.create_task(drive(handle, driver))
        session = await during(driving, begun.get())
        while session.session_id != before.session_id:
            session = await during(driving, begun.get())
        assert session.is_evaluation and session.response == before.response
        status = await operator.status()
        assert f"{status.evaluations[0].idle} sessions idle" in evaluation_line(status.evaluations[0]).plain
        evaluation.cancel()
        await until(operator, lambda status: not status.evaluations)
        with refused(NotFound, field="session_id"):
            await session.ask([5])
        driving.cancel()


@pytest.mark.full
async def test_the_service_evaluates_with_its_environment_and_is_killed(tiny_dense: Path, tmp_path: Path) -> None:
    """The newest version's evaluation is run again; one that was complete is not."""
    file, record = tmp_path / "held-out.jsonl", tmp_path / "record"
    rows = [{"text": "ab" * n, "prompt_id": f"held-{n}", "group_size": 2} for n in range(1, 7)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = settings_of(
        tiny_dense,
        tmp_path,
        record=str(record),
        environment__spec=HELD_OUT,
        rollout__max_tokens=8,
        rollout__ignore_eos=False,
        evaluation__prompts=str(file),
        evaluation__every=1,
        evaluation__share=0.125,  # there is room for those of all versions at once
        service__evaluation_versions=2,
    )
    service = Killed(tmp_path, settings)
    await service.start()
    rewards: list[float] = []
    try:
        async with dora.Trainer(service.address, token=service.token) as trainer:
            async for step in trainer.steps(groups=2):
                async for group in step:
                    rewards += [each.reward for each in group.trajectories]
                    if step.number == 1:
                        await service.restart()
                await step.commit(weights=tiny_dense, wait=True)
                if step.number == 2:
                    break
        async with (
            Operator(service.address, service.token) as operator,
            dora.Prompts(service.address, service.token) as prompts,
        ):
            await until(operator, lambda status: {1, 2, 3} <= {each.version for each in status.evaluated})
            asked = [{"text": "ab", "prompt_id": "one", "environment": HELD_OUT}]
            (group,) = (await prompts.evaluate(asked).whole()).groups
    finally:
        await service.stop()
    lines = [json.loads(line) for line in (record / "evaluations.jsonl").read_text().splitlines()]
    by_version = {line["version"]: line for line in lines}
    assert {each.reward for each in group.trajectories} == {1.0}
    assert set(rewards) == {0.0}, "sessions of training know that they are"
    assert len(lines) == len(by_version) and {1, 2, 3} <= set(by_version)
    for version in (1, 2, 3):
        found = by_version[version]
        assert (found["missing"], found["refused"], found["responses"]) == (0, 0, 12), found["reason"]
        assert found["reward_mean"] == 1.0


@pytest.mark.full
async def test_evaluated_sessions_have_the_rows_of_their_experts(tiny_moe: Path) -> None:
    """Each of their turns is prefilled whole, whose rows the service has already."""
    async with (
        running(config_of(tiny_moe, workers__router_replay=True)) as handle,
        dora.Prompts(handle.address, handle.token) as prompts,
    ):
        driving = asyncio.create_task(drive(handle, fork))
        evaluation = await during(driving, prompts.evaluate(held_out(3)).whole())
        driving.cancel()
    trajectories = [each for group in evaluation.groups for each in group.trajectories]
    assert [each.branch_index for each in trajectories] == [0, 1, 2, 3] * GROUP_SIZE * 3
    check_alone(trajectories, tiny_moe)
