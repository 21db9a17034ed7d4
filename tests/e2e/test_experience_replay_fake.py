"""Experience replay in whole runs: a service with fake engines, and the reference trainer across a restart."""

from dataclasses import replace
from pathlib import Path

import pytest

import dora
from dora.client import Operator
from dora.client.step import Step
from dora.config import Config
from dora.data.trajectory import TrajectoryGroup
from dora.errors import Conflict, InvalidValue
from dora.ops.verify.check import read_trajectories
from dora.ops.verify.committed import groups_replayed, missing
from dora.ops.verify.invariants import violations
from dora.orchestrator.main import ServiceHandle
from dora.trainers.checkpoint import REPLAY_FILE, path_of
from dora.trainers.grpo import train
from dora.trainers.learner import LearnerConfig
from dora.trainers.options import GrpoConfig
from tests.contract.trainer_service import TOKEN, StartService
from tests.refusals import refused
from tests.service import check_promises, configured, running

GROUPS, WINDOW, STEPS = 4, 3, 5
DIES = 1  # the step in which the first trainer ends: all groups of step 0 may be replayed in it


def config_of(model: Path, record: Path) -> Config:
    return configured(
        model,
        window__size=WINDOW,
        workers__engine="fake",
        rollout__ignore_eos=True,
        reward__function="tests.unit.reward_functions:parity",
        record=str(record),
    )


async def taken(step: Step) -> tuple[list[TrajectoryGroup], list[TrajectoryGroup]]:
    """The step's own groups and its replays."""
    return [group async for group in step], list(step.replays())


async def test_a_trainer_replays_within_the_bound_and_another_goes_on_with_its_buffer(
    tiny_dense: Path, tmp_path: Path
) -> None:
    record = tmp_path / "record"
    fresh: list[list[TrajectoryGroup]] = []
    replayed: dict[int, list[TrajectoryGroup]] = {}
    kept = b""
    async with running(config_of(tiny_dense, record)) as handle, Operator(handle.address, handle.token) as operator:
        async with trainer_of(handle) as first:
            async for step in first.steps(GROUPS):
                own, replays = await taken(step)
                if step.number == DIES:  # before the commit
                    break
                await step.commit(weights=handle.model, wait=True)
                fresh.append(own)
                replayed[step.number], kept = replays, first.replay.to_bytes() if first.replay else b""
        buffer = dora.ReplayBuffer(0.5, "priority")
        buffer.restore(kept, WINDOW)
        async with dora.Trainer(handle.address, token=handle.token, replay=buffer) as second:
            async for step in second.steps():
                again, same = await taken(step)
                if step.number == DIES:
                    assert sorted(map(str, again)) == sorted(map(str, own)), "delivered again"
                    assert [each.group_id for each in same] == [each.group_id for each in replays]
                await step.commit(weights=handle.model, wait=True)
                fresh.append(again)
                replayed[step.number] = same
                if step.number == STEPS - 1:
                    break
            status = await operator.status()
    check_promises(fresh, WINDOW, GROUPS)
    assert replayed[DIES], "the test replays something"
    for number, replays in replayed.items():
        for group in replays:
            assert group.staleness.max() <= WINDOW - 1 and group.trajectories[0].trained_step == number
    assert status.counters["groups_trained"] == STEPS * GROUPS, "a replay is no fresh group"
    assert status.steps[-1].metrics["groups_replayed"] == len(replayed[STEPS - 1])
    trajectories = read_trajectories(record / "trajectories.jsonl")
    committed, lacking = missing(record, trajectories)
    assert committed == STEPS and list(lacking) == list(violations(trajectories, WINDOW)) == []
    assert groups_replayed(record) == sum(map(len, replayed.values()))


def trainer_of(handle: ServiceHandle) -> dora.Trainer:
    return dora.Trainer(handle.address, token=handle.token, replay=dora.ReplayBuffer(0.5, "priority"))


async def test_a_step_that_names_its_own_groups_as_replays_is_refused(tiny_dense: Path, tmp_path: Path) -> None:
    async with running(config_of(tiny_dense, tmp_path / "record")) as handle, trainer_of(handle) as trainer:
        step = await anext(trainer.steps(GROUPS))
        own, _ = await taken(step)
        step._replayed = [own[0].group_id]
        with refused(InvalidValue, field="replayed_groups", value=own[0].group_id):
            await step.commit(weights=handle.model, wait=True)
        step._replayed = []
        assert (await step.commit(weights=handle.model, wait=True)).version == 1


async def test_a_window_of_one_version_is_refused(tiny_dense: Path, tmp_path: Path) -> None:
    config = configured(tiny_dense, window__size=1, workers__engine="fake")
    async with running(config) as handle, trainer_of(handle) as trainer:
        with refused(Conflict, field="replay.share", value=0.5):
            await anext(trainer.steps(GROUPS))


@pytest.mark.full
async def test_the_reference_trainer_replays_the_same_groups_after_a_restart(
    start_service: StartService, tmp_path: Path, tiny_dense: Path
) -> None:
    commits = []
    for name, lives in (("straight", [6]), ("restarted", [3, 3]), ("without checkpoints", [3, 3])):
        service = await start_service(tmp_path / name / "store", tiny_dense)
        config = GrpoConfig(
            service.address, TOKEN, groups=2, replay_share=0.5, checkpoints=str(tmp_path / name / "checkpoints"),
            learner=LearnerConfig(learning_rate=1e-3),
        )  # fmt: skip
        if name == "without checkpoints":
            config = replace(config, checkpoints="")
        for steps in lives:
            report = await train(replace(config, steps=steps))
        commits.append({commit.step: list(commit.replayed_groups) for commit in service.service.commits})
    straight, restarted, without = commits
    assert straight == restarted == {0: [], **{step: [f"s{step - 1}-g0", f"s{step - 1}-g1"] for step in range(1, 6)}}
    assert without == {**straight, 3: []}, "it begins with an empty buffer"
    assert (path_of(tmp_path / "straight" / "checkpoints", 6) / REPLAY_FILE).stat().st_size > 0
    last = report.steps[-1]
    assert last.replayed_ids == ("s4-g0", "s4-g1") and last.group_ids == ("s5-g0", "s5-g1")
    numbers = last.metrics.numbers()
    assert (numbers["groups"], numbers["groups_replayed"]) == (2, 2)
    assert (numbers["staleness_mean"], numbers["replay_staleness_mean"]) == (0.0, 1.0)
    assert numbers["trajectories"] == 4 and numbers["tokens_trained"] == 2 * 2 * (3 + 4)
    assert numbers["staleness_1/tokens_trained"] == 2 * (3 + 4)
