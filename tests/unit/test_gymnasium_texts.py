"""Environments of the package gymnasium, over a session in memory."""

import re
import sys
from typing import Any

import pytest

from dora.agents.environment.loading import load_environment
from dora.errors import InvalidValue
from tests.refusals import refused
from tests.unit import gymnasium_texts
from tests.unit.test_driven_environments import CHAT, FakeSession, attended

HERE = gymnasium_texts.__name__
SPEC = f"gymnasium:{HERE}:Number-v0"


def asked(session: FakeSession) -> str:
    return CHAT.decode(session.token_ids, special_tokens=True)


async def episode(*texts: str, **fields: Any) -> FakeSession:
    session = FakeSession(texts, **fields)
    await attended(load_environment(SPEC), session)
    return session


async def test_rewards_of_steps_add_up_until_the_time_limit() -> None:
    session = await episode("101", "102", "103")
    assert session.ended == (0.75, {}, {1: 0.25, 2: 0.25, 3: 0.25}, "too high")
    assert "Guess my number from 1 to 100" in asked(session) and session.names == ["reset", "step", "step"]


async def test_an_episode_ends_where_its_environment_does() -> None:
    session = await episode("101", verifier_json='{"options": {"largest": 1}}')
    assert session.ended is None and "from 1 to 1." in asked(session), "it went on, and the test's texts were over"
    session = await episode("1", verifier_json='{"options": {"largest": 1}}')
    assert session.ended == (1.0, {}, {1: 1.0}, "found")


async def test_a_prompt_gives_the_seed_or_the_group_has_one() -> None:
    first, second, other, seeded, again = [
        re.findall(r"hint: (\d+)", asked(await episode("x", **fields)))
        for fields in (
            {"session_id": "g0.0"},
            {"session_id": "g0.1"},
            {"prompt_id": "q"},
            {"verifier_json": '{"seed": 5}'},
            {"verifier_json": '{"seed": 5}', "prompt_id": "q"},
        )
    ]
    assert first == second != other and seeded == again != first


async def test_a_reply_outside_of_the_action_space_ends_the_episode() -> None:
    session = await episode("101", "Is it 7?")
    assert session.ended is not None
    reward, _, turns, log = session.ended
    assert (reward, turns) == (0.25, {1: 0.25, 2: 0.0}) and "action space" in log


async def test_a_wrong_seed_gives_the_session_up() -> None:
    session = await episode("1", verifier_json='{"seed": "many"}')
    assert "verifier.seed" in session.failed


@pytest.mark.parametrize(
    ("spec", "allowed"),
    [
        (f"gymnasium:{HERE}:Counted-v0", "observation space is Discrete"),
        ("gymnasium:NoSuch-v0", "gymnasium can make"),
        ("gymnasium:no_such_module:Number-v0", "gymnasium can make"),
    ],
)
def test_an_environment_without_texts_is_refused(spec: str, allowed: str) -> None:
    with refused(InvalidValue, field="--environment", value=spec) as found:
        load_environment(spec)
    assert allowed in str(found.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with refused(InvalidValue, field="--environment", value=SPEC) as found:
        load_environment(SPEC)
    assert "pip install" in str(found.value)
