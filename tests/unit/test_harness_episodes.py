"""Sessions of a harness that calls them over HTTP, without verifiers: its part is a coroutine of the test."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI

from dora.agents.environment.calls import EnvironmentFailed
from dora.agents.environment.verifiers import Attended, HarnessEpisodes
from dora.agents.environment.verifiers_process import bridge_variables
from dora.agents.front.app import serving
from dora.agents.front.gateway import Gateway
from dora.agents.front.listening import listening_socket
from dora.client.sessions import Turn
from dora.config import EnvironmentConfig
from dora.errors import InvalidValue
from dora.prompts.tasks import tasks_source
from dora.rewards.by_environment import score
from tests.refusals import refused
from tests.unit.test_driven_environments import CHAT, episodes, turn_of

ASK: Any = [{"role": "user", "content": "abc"}]
KEY = "the-key"


@dataclass(eq=False)
class FakeSession:
    """Answers each turn with ``Yes.``"""

    session_id: str = "g0.0"
    prompt_id: str = "tasks:3"
    version: int = 4
    verifier_json: str = '{"task": 3}'
    turn: Turn = field(default_factory=lambda: turn_of(0, (), None))
    response: Sequence[int] = ()
    prompt_token_ids: Any = field(default_factory=lambda: np.zeros(0, np.int32))
    ended: tuple[Any, ...] | None = None
    given_name: str = ""
    has_ended: bool = False

    async def stream(self, token_ids: Sequence[int], **named: Any) -> AsyncGenerator[Turn]:
        yield turn_of(self.turn.number + 1, [*CHAT.encode("Yes.", special_tokens=False), CHAT.ends()[0]])

    async def end(self, reward: Any, *, components: Any, turn_rewards: Any, log: str) -> None:
        self.ended = (reward, components, log)


@dataclass(frozen=True)
class Harness:
    """The other process's part."""

    run: Callable[[str, int, str], Awaitable[Any]]


@asynccontextmanager
async def harness(run: Callable[[str, int, str], Awaitable[Any]], timeout_s: float) -> AsyncIterator[HarnessEpisodes]:
    known: Any = Attended(Path("tiny"), 256)
    door = Gateway(known, episodes(None).model, key=KEY)
    async with serving(door, listening_socket("127.0.0.1:0", has_key=True)) as url:
        bridge: Any = Harness(run)
        yield HarnessEpisodes(bridge, door, known, url, timeout_s, asyncio.Semaphore(1))


async def ask(base_url: str) -> str:
    async with AsyncOpenAI(base_url=base_url, api_key=KEY, max_retries=0) as api:
        reply = await api.chat.completions.create(model="policy", messages=ASK)
    return f"{reply.model} {reply.choices[0].message.content}"


async def run(session: Any, work: Callable[[str, int, str], Awaitable[Any]], timeout_s: float = 30.0) -> None:
    async with harness(work, timeout_s) as found:
        await found.run(session)


async def test_a_session_ends_with_what_the_harness_returns() -> None:
    async def work(session_id: str, task: int, base_url: str) -> Any:
        said = [await ask(base_url) for _ in range(2)]
        return {"reward": 0.5, "components": {f"c{number}": 1.0 for number in range(99)}, "log": f"{task} {said[1]}"}

    session = FakeSession()
    await run(session, work)
    assert session.ended is not None and session.turn.number == 2
    reward, components, log = session.ended
    assert (reward, len(components), log) == (0.5, 99, "3 policy-v4 Yes.")


@pytest.mark.parametrize("asks", [False, True])
async def test_a_harness_that_is_stuck_gives_its_session_up(asks: bool) -> None:
    async def work(session_id: str, task: int, base_url: str) -> Any:
        if asks:
            await ask(base_url)
        await asyncio.Event().wait()

    session = FakeSession()
    with refused(EnvironmentFailed, names=["environment.timeout_s"]):
        await run(session, work, timeout_s=0.05)
    assert session.ended is None


async def test_a_harness_that_fails_gives_its_session_up() -> None:
    async def work(session_id: str, task: int, base_url: str) -> Any:
        raise EnvironmentFailed("HarnessError: 3")

    with refused(EnvironmentFailed, names=["3"]):
        await run(FakeSession(), work)


async def test_a_session_that_began_elsewhere_or_has_no_task_is_refused() -> None:
    async def work(session_id: str, task: int, base_url: str) -> Any:
        raise AssertionError

    with refused(EnvironmentFailed, names=["2"]):
        await run(FakeSession(turn=turn_of(2, [1])), work)
    with refused(InvalidValue, field="verifier.task"):
        await run(FakeSession(verifier_json='{"task": "x"}'), work)


def test_a_process_of_another_interpreter_has_no_token_and_its_own_programs() -> None:
    settings = EnvironmentConfig(spec="verifiers:x", python="/venvs/v/bin/python")
    found = bridge_variables(settings, {"DORA_TOKEN": "secret", "PATH": "/bin", "A": "1"})
    assert found == {"PATH": "/venvs/v/bin:/bin", "A": "1"}


def test_tasks_are_numbered_and_only_their_environment_scores_them() -> None:
    source = tasks_source()
    prompts = [source.at(number) for number in (0, 1)]
    assert [each.verifier_json for each in prompts if each] == ['{"task": 0}', '{"task": 1}']
    assert [each.prompt_id for each in prompts if each] == ["tasks:0", "tasks:1"] and source.reward.endswith(":score")
    with pytest.raises(ValueError):
        score("", "", [], {})
