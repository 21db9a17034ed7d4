"""Environments behind servers of OpenEnv, over their own WebSockets and sessions in memory."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from yarl import URL

import dora
from dora.agents.environment.loading import load_environment
from dora.agents.environment.openenv import OpenEnvEpisode, Server
from dora.agents.environment.openenv_actions import actions_of, text_of
from dora.agents.environment.protocol import Reply, Task
from dora.agents.environment.spec import seed_of
from dora.errors import InvalidValue
from tests.clients import openenv_serving as openenv
from tests.e2e.test_environment_fake import config_of, driven
from tests.refusals import refused
from tests.service import check_promises, train
from tests.unit.test_driven_environments import CALL, CHAT, FakeSession, attended

BEGINS_S = 240.0  # a server imports much first
NUMBER = seed_of("p") % 100 + 1
MESSAGE = {"properties": {"message": {"type": "string"}, "metadata": {"type": "object"}}, "required": ["message"]}
GUESS = {"properties": {"number": {"type": "integer"}}, "required": ["number"]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def number() -> AsyncIterator[str]:
    async with openenv.server([openenv.SERVERS, "number"], openenv.ROOT) as url:
        yield url


async def episode(url: str, *texts: str, turns: int = 0, **fields: Any) -> FakeSession:
    session = FakeSession(texts, **fields)
    await attended(load_environment(f"openenv:{url}"), session, turns=turns, timeout_s=BEGINS_S)
    return session


def asked(session: FakeSession) -> str:
    return CHAT.decode(session.token_ids, special_tokens=True)


def reply_of(text: str) -> Reply:
    return Reply(0, text, (), "stop")


async def test_the_echo_environment_of_openenv(tmp_path: Path) -> None:
    """It has room for one session: the other waits. It never ends an episode."""
    async with openenv.echo(tmp_path) as url:
        make = load_environment(f"openenv:{url}")
        sessions = [FakeSession(("abc", '{"message": "abcde"}'), session_id=f"g0.{number}") for number in range(2)]
        await attended(make, *sessions, turns=2, timeout_s=BEGINS_S)
    for session in sessions:
        assert session.ended is not None, session.failed
        reward, components, turns, log = session.ended
        assert (reward, turns, log) == (0.5 + 3 * 0.1, {1: 3 * 0.1, 2: 0.5}, "environment.turns = 2")
        assert components == {"step": 2.0} and "Echo Env environment ready!" in asked(session)
        assert json.dumps({"echoed_message": "abc", "message_length": 3}) in asked(session)


async def test_an_episode_ends_where_its_environment_does(number: str) -> None:
    session = await episode(number, '{"number": 0}', f'I say\n```json\n{{"number": {NUMBER}}}\n```')
    assert session.ended is not None, session.failed
    assert session.ended[:3] == (1.25, {"distance": 0.0}, {1: 0.25, 2: 1.0})
    assert session.ended[3] == "episode g0.0, 2 steps: found"
    assert "abc\n\n1 to 100" in asked(session)


async def test_a_prompt_gives_what_reset_gets(number: str) -> None:
    about = json.dumps({"seed": 6, "options": {"most": 10}})
    session = await episode(number, '{"number": 7}', verifier_json=about)
    assert session.ended is not None and session.ended[0] == 1.0 and "1 to 10" in asked(session), session.failed


async def test_a_policy_is_told_of_a_reply_that_is_no_action(number: str) -> None:
    session = await episode(number, "seven", '{"number": "seven"}', '{"number": 0}', turns=3)
    assert session.ended is not None and session.ended[2] == {1: 0.0, 2: 0.0, 3: 0.25}, session.failed
    assert "JSON object with the fields number" in asked(session) and "; number: " in asked(session)


async def test_an_environment_that_fails_gives_its_session_up(number: str) -> None:
    session = await episode(number, '{"number": -1}')
    assert session.ended is None and session.failed.endswith("EXECUTION_ERROR: a broken environment")


async def test_a_server_without_room_or_that_is_away_is_waited_for_a_bounded_time(number: str) -> None:
    task, there = Task("p", session_id="g0.0"), Server(URL(number), full_s=0.0)
    episodes = [OpenEnvEpisode(there) for _ in range(3)]
    await asyncio.gather(*(each.reset(task) for each in episodes[:2]))
    session = FakeSession(("x",))
    await attended(lambda: OpenEnvEpisode(there), session)
    assert "CAPACITY_REACHED" in session.failed
    await episodes[0].close()
    await attended(lambda: OpenEnvEpisode(Server(URL(number))), session := FakeSession(('{"number": 0}',)), turns=1)
    assert session.ended is not None, session.failed
    await episodes[1].close()
    await attended(lambda: OpenEnvEpisode(Server(URL("http://127.0.0.1:1"), away_s=0.0)), session := FakeSession())
    assert "cannot be reached" in session.failed


async def test_tools_of_a_server_are_called() -> None:
    async with openenv.server([openenv.SERVERS, "tools"], openenv.ROOT) as url:
        session = await episode(url, CALL, "It is 3.")
    assert session.ended is not None, session.failed
    assert session.ended[3] == "the reply calls no tool" and session.names == ["reset", "add"]
    assert "Adds numbers." in asked(session) and "the sum is 3" in asked(session)


@pytest.mark.parametrize(
    ("schema", "text", "found"),
    [
        (MESSAGE, " Hi. ", [{"message": "Hi."}]),
        (MESSAGE, '{"message": "x"}', [{"message": "x"}]),
        (MESSAGE, '{"other": "x"}', [{"message": '{"other": "x"}'}]),
        (MESSAGE, "```\n[1]\n```", [{"message": "```\n[1]\n```"}]),
        (GUESS, "7", []),
        (GUESS, '{"number": 7, "metadata": {}}', [{"number": 7, "metadata": {}}]),
        (GUESS, '{"number": NaN}', []),
        ({"properties": {"a": {"type": "string"}, "b": {"type": "string"}}}, "x", []),
        ({"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}, "x", [{"a": "x"}]),
    ],
)
def test_a_reply_is_an_object_or_the_only_text_of_an_action(schema: Any, text: str, found: Any) -> None:
    assert actions_of(schema).of(reply_of(text)) == found


def test_an_observation_of_one_text_is_that_text() -> None:
    assert text_of({"prompt": "Go.", "metadata": {}}) == "Go."
    assert json.loads(text_of({"prompt": "Go.", "left": 3, "metadata": {}})) == {"prompt": "Go.", "left": 3}


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://host", "http://user@host", "http://host/?x=1"])
def test_another_url_is_refused(url: str) -> None:
    with refused(InvalidValue, field="--environment", value=f"openenv:{url}"):
        load_environment(f"openenv:{url}")


@pytest.mark.full
async def test_a_service_trains_on_the_echo_environment(tiny_dense: Path, tmp_path: Path) -> None:
    async with openenv.echo(tmp_path) as url:
        config = config_of(tiny_dense, environment__spec=f"openenv:{url}", environment__turns=2)
        async with driven(config) as handle, dora.Trainer(handle.address, token=handle.token) as trainer:
            steps = await train(handle, trainer, steps=2, groups=2)
    check_promises(steps, window=2, groups=2)
    for each in (each for step in steps for group in step for each in group.trajectories):
        assert each.reward_valid and len(each.turn_rewards) == 2 and each.reward > 0, each.verifier_log
