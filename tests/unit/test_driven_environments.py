"""Environments that DORA drives: the protocol, its errors and its limits, over a session in memory."""

import asyncio
import re
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest

from dora.agents.chat.rendering import ChatRenderer
from dora.agents.chat.tool_calls import format_of
from dora.agents.environment import loading
from dora.agents.environment.attending import Attending, Failing
from dora.agents.environment.child import EnvironmentProcess
from dora.agents.environment.episode import Episodes
from dora.agents.environment.guard import Guard
from dora.agents.environment.loading import load_environment
from dora.agents.environment.protocol import End, Steps
from dora.agents.front.model import ServedModel
from dora.client.sessions import Turn
from dora.config import EnvironmentConfig
from dora.errors import InvalidValue
from dora.rewards.limits import UserLimits
from dora.rpc.errors import ServiceUnavailable
from tests.refusals import refused
from tests.unit import environment_classes
from tests.unit.chat_templates import STYLES
from tests.unit.chats import Chat
from tests.unit.environment_classes import Broken, Calls, Echo, Five, Stuck, Wrong

CHAT = Chat(STYLES["qwen2.5"])
HERE = environment_classes.__name__
CALL = '<tool_call>\n{"name": "add", "arguments": {"numbers": [1, 2]}}\n</tool_call>'


def turn_of(number: int, token_ids: Sequence[int], reason: Any = "stop") -> Turn:
    return Turn(number, np.asarray(token_ids, np.int32), np.zeros(len(token_ids), np.float32), reason)


@dataclass(eq=False)
class FakeSession:
    """Answers with ``texts`` in turn. ``lost``: calls that find no service. ``room``: turns that the context
    has room for.
    """

    texts: Sequence[str] = ("one", "two", "three")
    lost: int = 0
    room: int = 1 << 20
    session_id: str = "g0.0"
    prompt_id: str = "p"
    task_id: str = "t"
    prompt_text: str = "abc"
    verifier_json: str = '{"answer": 3}'
    is_evaluation: bool = False
    prompt_token_ids: Any = field(default_factory=lambda: np.zeros(0, np.int32))
    turn: Turn = field(default_factory=lambda: turn_of(0, (), None))
    token_ids: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    contexts: int = 0
    ended: tuple[Any, ...] | None = None
    is_cached: bool = False
    is_warm: bool = False
    rewound: int = 0
    failed: str = ""
    fault: str = ""

    async def begin(self, prompt_token_ids: Sequence[int], *, max_tokens: int = 0, name: str = "") -> Turn:
        self.contexts += 1
        self.token_ids = []
        return await self.ask(prompt_token_ids, name=name)

    async def ask(self, given_token_ids: Sequence[int], *, max_tokens: int = 0, name: str = "") -> Turn:
        if self.lost:
            self.lost -= 1
            raise ServiceUnavailable("gone")
        if self.turn.number == self.room:
            raise InvalidValue("given_token_ids", len(given_token_ids), "1 to 0")
        self.names.append(name)
        text = self.texts[self.turn.number]
        sampled = [*CHAT.encode(text, special_tokens=False), CHAT.ends()[0]]
        self.token_ids += [*given_token_ids, *sampled]
        self.turn = turn_of(self.turn.number + 1, sampled)
        return self.turn

    async def end(
        self,
        reward: float | None = None,
        *,
        components: Mapping[str, float] | None = None,
        turn_rewards: Mapping[int, float] | None = None,
        log: str = "",
        is_cached: bool = False,
        is_warm: bool = False,
    ) -> None:
        self.ended = (reward, dict(components or {}), dict(turn_rewards or {}), log)
        self.is_cached, self.is_warm = is_cached, is_warm

    def rewind(self) -> None:
        self.turn, self.prompt_token_ids, self.token_ids = turn_of(0, (), None), np.zeros(0, np.int32), []
        self.rewound += 1

    async def fail(self, reason: str, fault: str = "session") -> str:
        self.failed, self.fault = reason, fault
        return ""


def episodes(make: Any, timeout_s: float = 30.0, turns: int = 0) -> Episodes:
    ends = frozenset(CHAT.ends())
    model: Any = ServedModel(CHAT, ends, format_of(CHAT.style.template), ChatRenderer(CHAT, ends))  # type: ignore[arg-type]
    return Episodes(make, model, timeout_s, asyncio.Semaphore(2), turns=turns)


async def attended(
    make: Any, *sessions: FakeSession, timeout_s: float = 30.0, at_once: int = 2, turns: int = 0
) -> None:
    """Runs the sessions, each of which is offered twice."""

    async def attend() -> AsyncGenerator[Failing]:
        for session in sessions:
            yield session
            yield session

    await Attending(episodes(make, timeout_s, turns).run, at_once).run(attend)


async def test_a_session_is_a_chat_whose_tokens_are_kept() -> None:
    session = FakeSession()
    await attended(Echo, session)
    tokens = len(CHAT.encode("three", special_tokens=False)) + 1
    assert session.ended == (3.0, {"turns": 3.0}, {1: 0.5, 3: 1.5}, f"{tokens} tokens")
    chat = [{"role": "user", "content": "abc"}]
    for number, text in enumerate(("one", "two")):
        chat += [{"role": "assistant", "content": text}, {"role": "user", "content": f"more {number}"}]
    whole = CHAT.render(chat) + "three"
    assert CHAT.decode(session.token_ids, special_tokens=True).startswith(whole)
    assert session.names == ["reset", "step", "step"] and session.contexts == 1


async def test_the_five_tuple_of_gymnasium_adds_up() -> None:
    session = FakeSession()
    await attended(Five, session)
    assert session.ended == (3.0, {}, {1: 1.0, 2: 1.0, 3: 1.0}, "turn 2")


async def test_a_session_ends_after_its_turns_or_where_the_context_is_full() -> None:
    limited, full, scored, whole = FakeSession(), FakeSession(room=2), FakeSession(room=1), FakeSession()
    await attended(Five, limited, turns=2)
    await attended(Five, full)
    await attended(Echo, scored)
    await attended(Five, whole, turns=3)
    assert limited.ended == (2.0, {}, {1: 1.0, 2: 1.0}, "environment.turns = 2")
    assert full.ended is not None and full.ended[:3] == (2.0, {}, {1: 1.0, 2: 1.0}) and "no room" in full.ended[3]
    assert scored.ended is not None and scored.ended[:3] == (None, {}, {}), "the reward function scores it"
    assert whole.ended is not None and whole.ended[3] == "turn 2"


async def test_tool_calls_are_parsed_and_answered() -> None:
    session = FakeSession((CALL, "It is 3."))
    await attended(Calls, session)
    assert session.ended == (1.0, {}, {}, "It is 3.") and session.names == ["reset", "add"]
    assert CALL in CHAT.decode(session.token_ids) and "3" in CHAT.decode(session.token_ids)


async def test_a_service_that_is_away_costs_a_session_nothing() -> None:
    session = FakeSession(lost=2)
    await attended(Echo, session)
    assert session.ended is not None and not session.failed


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Broken, "RuntimeError: no such thing"),
        (Wrong, r"step\(\) = .* a list of at least one message"),
        (Stuck, "took longer than environment.timeout_s = 0.05"),
    ],
)
async def test_what_fails_gives_its_session_up_with_the_reason_in_one_line(make: Any, reason: str) -> None:
    session, closed = FakeSession(), Stuck.closed
    await attended(make, session, timeout_s=0.05 if make is Stuck else 30.0)
    assert session.ended is None and re.search(reason, session.failed) and "\n" not in session.failed
    assert Stuck.closed - closed == (make is Stuck)


async def test_a_session_that_another_process_began_is_given_up() -> None:
    session = FakeSession(turn=turn_of(2, [1]))
    await attended(Echo, session)
    assert session.failed.endswith("the process of its environment ended after turn 2")
    session = FakeSession(prompt_token_ids=np.ones(3, np.int32))
    await attended(Echo, session)
    assert "prompt p has tokens" in session.failed


async def test_a_bounded_number_runs_and_starts_up_at_once() -> None:
    starting, running, together = [0, 0], [0, 0], asyncio.Barrier(5)  # counts: now, most

    def change(count: list[int], by: int) -> None:
        count[0] += by
        count[1] = max(count)

    class Counted(Echo):
        async def reset(self, task: Any) -> Any:
            change(starting, 1)
            change(running, 1)
            await asyncio.sleep(0)
            change(starting, -1)
            return await super().reset(task)

        async def step(self, reply: Any) -> Any:
            await together.wait()
            return await super().step(reply)

        async def close(self) -> None:
            change(running, -1)

    sessions = [FakeSession(session_id=f"g0.{number}") for number in range(10)]
    await attended(Counted, *sessions, at_once=5)
    assert (starting[1], running[1]) == (2, 5) and all(each.ended for each in sessions)


@pytest.mark.parametrize(
    ("spec", "allowed"),
    [
        ("none", "module:Class"),
        ("no.such:Thing", "can be imported"),
        (f"{HERE}:Nothing", "has no Nothing"),
        (f"{HERE}:NotAsync", "async def reset"),
        ("reasoning-gym:chain_sum", "--prompts"),
    ],
)
def test_a_class_that_cannot_drive_sessions_is_refused_by_name(spec: str, allowed: str) -> None:
    with refused(InvalidValue, field="--environment", value=spec) as found:
        load_environment(spec)
    assert re.search(allowed, str(found.value))


def test_an_installed_package_adds_an_adapter_by_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("echo", f"{HERE}:echoes", loading.GROUP),
        EntryPoint("openenv", f"{HERE}:echoes", loading.GROUP),
        EntryPoint("broken", "tests.unit.no_such_module:episodes", loading.GROUP),
    ]
    monkeypatch.setattr(loading, "entry_points", lambda group: points if group == loading.GROUP else [])
    make = load_environment("echo:x")
    assert make is not None and isinstance(make(), Echo)
    with refused(InvalidValue, field="--environment", value="echo:", names=("module:Class",)):
        load_environment("echo:")
    with refused(InvalidValue, field="--environment", value="openenv:x", names=("URL of a server",)):  # DORA's own
        load_environment("openenv:x")
    with refused(InvalidValue, field="--environment", value="broken:x", names=("no_such_module",)):
        load_environment("broken:x")
    with refused(InvalidValue, field="--environment", names=("gymnasium", "verifiers", "echo", "broken")):
        load_environment("no.such:Thing")


def test_a_service_refuses_the_class_before_it_starts() -> None:
    with refused(InvalidValue, field="--environment") as found:
        EnvironmentProcess(EnvironmentConfig(spec=f"{HERE}:NotAsync"))
    assert "async def reset" in str(found.value)


@pytest.mark.parametrize(
    ("result", "field"),
    [
        (("x", 1.0), "values of the tuple"),
        (("x", "much", False, False, {}), "reward"),
        ((3, 1.0, False, False, {}), "observation"),
        ([], "step()"),
        ([{"role": "assistant", "content": "x"}], "role"),
        (End("much"), "End.reward"),  # type: ignore[arg-type]
        (End(1.0, turn_rewards={2: 1.0}), "turn"),
        (End(1e39), "End.reward"),
        (End(1.0, turn_rewards={0: -1e39}), "End.turn_rewards"),
    ],
)
def test_results_that_are_no_step_are_refused(result: Any, field: str) -> None:
    with pytest.raises(InvalidValue) as found:
        Steps().read(result, 1)
    assert field in found.value.field


def test_a_process_ends_itself_at_its_limits() -> None:
    limits = UserLimits(memory_mb=1 << 20, open_files=1 << 20, section="environment")  # this process has other tests
    assert Guard(limits, 60.0).reason() == ""
    assert "environment.timeout_s" in Guard(limits, -1.0).reason()
    assert "environment.memory_mb = 1" in Guard(replace(limits, memory_mb=1), 60.0).reason()
    assert "environment.open_files = 1" in Guard(replace(limits, open_files=1), 60.0).reason()
    assert "environment.processes = -1" in Guard(replace(limits, processes=-1), 60.0).reason()
    assert UserLimits.from_argument(limits.as_argument()) == limits


class Long(Echo):
    """Its messages grow: the last has 3 MB, or the first if ``at_once``."""

    at_once = False

    async def reset(self, task: Any) -> Any:
        return [{"role": "user", "content": "abc " * (750_000 if self.at_once else 1)}]

    async def step(self, reply: Any) -> Any:
        return [{"role": "user", "content": "abc " * (750_000 if reply.turn else 20_000)}]


class LongAtOnce(Long):
    at_once = True


class Measured(Chat):
    """Notes how much it tokenises at once."""

    longest = 0

    def encode(self, text: str, special_tokens: bool = True) -> tuple[int, ...]:
        assert len(text) < 10_000 or threading.current_thread() is not threading.main_thread(), "other sessions wait"
        self.longest = max(self.longest, len(text))
        return super().encode(text, special_tokens)


async def test_of_a_message_beyond_the_context_only_the_beginning_is_tokenised_beside_the_event_loop() -> None:
    chat, ended, unbegun = Measured(STYLES["qwen2.5"]), FakeSession(), FakeSession()
    ends = frozenset(chat.ends())
    model: Any = ServedModel(chat, ends, format_of(chat.style.template), ChatRenderer(chat, ends))  # type: ignore[arg-type]
    await replace(episodes(Long), model=model, context_tokens=100_000).run(ended)
    assert ended.ended is not None and ended.turn.number == 2, "its second answer was given"
    assert "3,000,000 characters" in ended.ended[3] and "100000 tokens" in ended.ended[3]
    assert 80_000 <= chat.longest <= 800_000
    with refused(InvalidValue, field="given_token_ids", value="a message of 3,000,000 characters"):
        await replace(episodes(LongAtOnce), context_tokens=100_000).run(unbegun)
