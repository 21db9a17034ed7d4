"""A service that drives an environment of its prompts, with fake engines, while the environment's process is killed."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import psutil
import pytest

import dora
from dora.agents.environment.child import EnvironmentProcess
from dora.client import Operator
from dora.config import Config
from dora.ops.view.service import sessions_idle
from dora.orchestrator.main import ServiceHandle
from dora.rpc.roles import Role
from dora.system.process_tree import descendants
from tests.service import check_promises, configured, during, running, train, until
from tests.snippets import snippet

STEPS, GROUPS, GROUP_SIZE = 2, 3, 4
SPEC = "tests.unit.environment_classes:Echo"


def config_of(model: Path, **fields: Any) -> Config:
    """Prompts of a source, all for the environment."""
    fake = {"workers__engine": "fake", "window__size": 2, "rollout__max_tokens": 8, "environment__spec": SPEC}
    return configured(model, **{**fake, **fields})


@asynccontextmanager
async def driven(config: Config, processes: int = 1) -> AsyncIterator[ServiceHandle]:
    """A service with processes as that of ``dora serve --environment``, which go on until it has drained."""
    environments = [EnvironmentProcess(config.environment, ("GATE",)) for _ in range(processes)]
    try:
        async with running(config) as handle:
            for each in environments:
                each.start(handle.address, handle.tokens[Role.ENVIRONMENT], handle.model)
            yield handle
    finally:
        for each in environments:
            await each.stop()


def check_steps(steps: list[Any], turns: int = 3) -> list[Any]:
    """Every trajectory is a whole session of the environment. Returns them."""
    check_promises(steps, window=2, groups=GROUPS)
    found = [each for step in steps for group in step for each in group.trajectories]
    for each in found:
        assert each.reward_valid and each.reward == float(turns) and len(each.events) == turns, each.verifier_log
        assert {event.name for event in each.events} == {"reset", "step"}
        assert dict(each.reward_components) == {"turns": float(turns)}
        assert (each.logprobs[each.loss_mask.astype(bool)] < 0).all()
    return found


def kill() -> set[int]:
    """Kills the environment's process. Returns its id."""
    found = {each for each in descendants() if "environment" in psutil.Process(each).cmdline()}
    for each in found:
        os.kill(each, signal.SIGKILL)
    return found


async def test_a_service_trains_while_its_environment_is_killed(tiny_dense: Path) -> None:
    """The sessions of a process that died are replaced, and each step has all of its groups."""
    config, killed, steps = config_of(tiny_dense), set[int](), list[Any]()
    async with driven(config) as handle, dora.Trainer(handle.address, token=handle.token) as trainer:
        async for step in trainer.steps(groups=GROUPS):
            groups = []
            async for group in step:
                killed.update(set() if killed else kill())  # others of the window are under way
                groups.append(group)
            steps.append(groups)
            await step.commit(weights=handle.model, wait=True)
            if len(steps) == STEPS:
                break
    assert len(killed) == 1
    found = check_steps(steps)
    assert len(found) == STEPS * GROUPS * GROUP_SIZE and len({each.trajectory_id for each in found}) == len(found)


@pytest.mark.full
async def test_the_sessions_of_a_killed_process_go_on_at_another(
    tiny_dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers of an environment come and go. No session is replaced, and no turn is sampled twice."""
    gate = tmp_path / "gate"
    monkeypatch.setenv("GATE", str(gate))
    config = config_of(tiny_dense, environment__spec="tests.unit.environment_classes:Held", environment__warm=2)
    joined = EnvironmentProcess(config.environment, ("GATE",))
    async with (
        driven(config) as handle,
        dora.Trainer(handle.address, token=handle.token) as trainer,
        Operator(handle.address, handle.token) as operator,
    ):
        training = asyncio.create_task(train(handle, trainer, steps=STEPS, groups=GROUPS))
        sessions = STEPS * GROUPS * GROUP_SIZE  # what the window admits: each waits in its second step
        await during(training, until(operator, lambda status: sessions_idle(status) >= sessions))
        joined.start(handle.address, handle.tokens[Role.ENVIRONMENT], handle.model)
        gate.touch()
        assert len(kill()) >= 1
        steps = await training
        status = await operator.status()
        await joined.stop()
    found = check_steps(steps)
    assert len(found) == sessions and {each.trajectory_id.count("~") for each in found} == {0}
    counted = status.counters
    assert counted["sessions_replaced"] == 0 and counted["turns_forked"] == 0
    assert counted["sessions_warm"] > 0
    for each in found:
        assert each.branch_index == 0 and each.loss_mask.sum() + given_tokens(each) == each.length_tokens


def given_tokens(trajectory: Any) -> int:
    return int((trajectory.logprobs == 0).sum())


@pytest.mark.full
async def test_prompts_whose_environments_exit_leave_and_crash_cost_the_others_nothing(
    tiny_dense: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Their groups are cancelled with the reason, and replaced. Every session that is delivered has its reward."""
    spec = "tests.unit.environment_classes:Mixed"
    config = config_of(tiny_dense, environment__spec=spec)
    async with (
        driven(config) as handle,
        dora.Trainer(handle.address, token=handle.token) as trainer,
        Operator(handle.address, handle.token) as operator,
    ):
        steps = await train(handle, trainer, steps=STEPS, groups=GROUPS)
        counted = (await operator.status()).counters
    found = check_steps(steps)
    assert len(found) == STEPS * GROUPS * GROUP_SIZE
    assert {crc32(each.prompt_id.encode()) % 5 for each in found} <= {3, 4}, "the others are cancelled"
    assert counted["groups_cancelled"] > 0
    said = [each.getMessage() for each in caplog.records]
    ended = [each for each in said if "has ended its process" in each]
    assert ended and all("prompt " in each and ("exit status" in each or "signal" in each) for each in ended)
    assert len(ended) == len(set(ended)), "each is logged once"


async def test_the_environment_of_the_documentation(
    tiny_dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes share the sessions."""
    (tmp_path / "guessing.py").write_text(snippet("docs/environments.md", "class Guess"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    config = config_of(tiny_dense, environment__spec="guessing:Guess")
    async with driven(config, 2) as handle, dora.Trainer(handle.address, token=handle.token) as trainer:
        (step, *_) = await train(handle, trainer, steps=1, groups=GROUPS)
    for each in (each for group in step for each in group.trajectories):
        assert each.reward_valid and "find" in each.verifier_log and "valid_guesses" in each.reward_components


async def test_a_text_game_of_gymnasium(tiny_dense: Path) -> None:
    """Most of what a fake engine writes is no number, which ends a session."""
    config = config_of(tiny_dense, environment__spec="gymnasium:tests.unit.gymnasium_texts:Number-v0")
    async with driven(config) as handle, dora.Trainer(handle.address, token=handle.token) as trainer:
        (step,) = await train(handle, trainer, steps=1, groups=GROUPS)
    for each in (each for group in step for each in group.trajectories):
        assert each.reward_valid and each.reward == sum(each.turn_rewards.values()), each.verifier_log
        assert 1 <= len(each.turn_rewards) <= 3 and set(each.turn_rewards.values()) <= {0.0, 0.25, 1.0}
