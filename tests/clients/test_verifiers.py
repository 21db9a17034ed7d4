"""Tasksets of verifiers, with its own harnesses in its own environment, against a service."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

import dora
from dora.agents.environment.child import EnvironmentProcess
from dora.client import Operator
from dora.client.sessions import REASON_MAX
from dora.config import Config, EnvironmentConfig
from dora.data.run_record import TRAJECTORIES_FILE
from dora.data.trajectory import Trajectory
from dora.errors import InvalidValue
from dora.ops.demo.trainer_process import TrainerProcess
from dora.ops.verify.check import read_trajectories, verify
from dora.rpc.roles import Role
from dora.system.process_tree import descendants
from tests.clients.environments import python_of
from tests.e2e.test_environment_fake import driven
from tests.refusals import refused
from tests.service import check_promises, configured, train
from tests.snippets import ROOT

pytestmark = pytest.mark.full  # its environment has half a gigabyte
HERE: Final = ROOT / "tests" / "clients"
TRAINED: Final = """
[env]
taskset = { id = "guess_number" }

[client]
type = "train"
"""


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasksets are found, and programs of harnesses run without fetching anything."""
    modules = [str(HERE / "tasksets"), *filter(None, [os.getenv("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(modules))
    monkeypatch.setenv("PATH", f"{HERE / 'offline'}{os.pathsep}{os.environ['PATH']}")


def config_of(model: Path, spec: str, **fields: Any) -> Config:
    about = {"prompts": "tasks", "environment__spec": f"verifiers:{spec}", "environment__starting": 2}
    fake = {"workers__engine": "fake", "window__size": 1, "rollout__max_tokens": 8, "rollout__group_size": 2}
    return configured(model, **{**fake, **about, "environment__python": str(python_of("verifiers")), **fields})


def kill(program: str) -> set[int]:
    """Kills what runs this program, once some of its own have begun. Returns its ids."""
    found = {each for each in descendants() if any(program in word for word in psutil.Process(each).cmdline())}
    begun = {each for each in found if psutil.Process(each).children()}
    for each in begun:
        os.kill(each, signal.SIGKILL)
    return begun


async def a_step(config: Config, groups: int = 1) -> list[Trajectory]:
    async with driven(config) as handle, dora.Trainer(handle.address, token=handle.token) as trainer:
        (step,) = await train(handle, trainer, steps=1, groups=groups)
    check_promises([step], window=config.window.size, groups=groups)
    return [each for group in step for each in group.trajectories]


def check_guesses(each: Trajectory, turns: int = 2) -> None:
    """A whole session of ``guess_number``."""
    parts = each.reward_components
    assert each.reward_valid and len(each.events) == turns and not each.branch_index, each.verifier_log
    assert parts.keys() == {"digits", "replies"} and parts["replies"] == turns and parts["digits"] == each.reward
    assert f", {turns} turns" in each.verifier_log
    assert {event.name.partition(" ")[0] for event in each.events} == {"agent"}


async def test_a_taskset_of_several_turns_is_driven_unchanged(tiny_dense: Path) -> None:
    for each in await a_step(config_of(tiny_dense, "guess_number", rollout__group_size=1)):
        check_guesses(each)


async def test_a_harness_that_knows_a_base_url_runs_its_loop(tiny_dense: Path) -> None:
    """verifiers' ``bash``, which its tasksets have by default."""
    for each in await a_step(config_of(tiny_dense, "one_answer")):
        assert each.reward_valid and len(each.events) == 1 and each.verifier_log.startswith("task 0, 1 turns")
        assert each.reward == each.reward_components["characters"]


async def test_the_client_for_training_gets_the_tokens(tiny_dense: Path, tmp_path: Path) -> None:
    """It renders the chat itself, and asks for vLLM's route of tokens."""
    file = tmp_path / "env.toml"
    file.write_text(TRAINED)
    for each in await a_step(config_of(tiny_dense, str(file), rollout__max_tokens=6)):
        assert each.reward_valid and each.reward_components["replies"] == 2, each.verifier_log


async def test_a_limit_of_turns_is_the_agents(tiny_dense: Path) -> None:
    for each in await a_step(config_of(tiny_dense, "guess_number", environment__turns=1)):
        check_guesses(each, turns=1)


async def test_a_service_trains_while_the_process_of_verifiers_is_killed(tiny_dense: Path) -> None:
    """Its sessions that had begun are replaced, and others wait for the next one."""
    config = config_of(tiny_dense, "guess_number")
    async with (
        driven(config) as handle,
        dora.Trainer(handle.address, token=handle.token) as trainer,
        Operator(handle.address, handle.token) as operator,
    ):
        training = asyncio.create_task(train(handle, trainer, steps=1, groups=1))
        async for _ in operator.watch(period_ms=100):
            if killed := kill("verifiers_bridge.py"):
                break
        (step,) = await training
    assert killed
    for each in (each for group in step for each in group.trajectories):
        check_guesses(each)


async def test_an_episode_that_fails_is_replaced_with_its_reason(tiny_dense: Path) -> None:
    config = config_of(tiny_dense, "broken_reward", sessions__replacements=1)
    for each in await a_step(config):
        assert not each.reward_valid and "no reward today" in each.verifier_log[:REASON_MAX]


@pytest.mark.parametrize(
    ("spec", "fields", "field", "allowed"),
    [
        ("guess_number", {"python": ""}, "environment.python", "interpreter"),
        ("guess_number", {"python": "/no/such/python"}, "environment.python", "interpreter"),
        ("no_such_taskset", {}, "--environment", "no_such_taskset"),
    ],
)
def test_a_taskset_that_does_not_load_is_refused(spec: str, fields: dict[str, str], field: str, allowed: str) -> None:
    settings = {"spec": f"verifiers:{spec}", "python": str(python_of("verifiers")), **fields}
    with refused(InvalidValue, field=field) as found:
        EnvironmentProcess(EnvironmentConfig(**settings))  # type: ignore[arg-type]
    assert allowed in str(found.value)


@pytest.mark.e2e
@pytest.mark.timeout(600)
async def test_a_tiny_model_trains_on_a_taskset_at_window_three(tmp_path: Path, tiny_dense: Path) -> None:
    steps, groups, size, record = 4, 2, 2, tmp_path / "record"
    fields: dict[str, Any] = {"workers__engine": "vllm", "window__size": 3, "record": str(record)}
    config = config_of(tiny_dense, "guess_number", **fields, workers__slots=8, environment__starting=4)
    async with driven(config) as handle:
        arguments = ["--address", handle.address, "--groups", str(groups), "--steps", str(steps), "--lr", "3e-3"]
        token, log = handle.tokens[Role.TRAINER], tmp_path / "trainer.log"
        async with TrainerProcess(arguments, token, 1, log, tmp_path / "trained.jsonl") as trainer:
            assert await trainer.run() == 0, trainer.last_words()
    found = list(read_trajectories(record / TRAJECTORIES_FILE))
    assert len(found) == steps * groups * size
    for each in found:
        check_guesses(each)
    assert verify(record, window_versions=3).ok
