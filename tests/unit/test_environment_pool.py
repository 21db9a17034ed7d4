"""Environments that start up ahead, get stuck, or repeat themselves, and sessions that another process began."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from dora.agents.environment.attending import Attending
from dora.agents.environment.calls import STUCK_MAX, Calls, EnvironmentFailed, TimeOver
from dora.agents.environment.episode import Episodes
from dora.agents.environment.guard import Guard
from dora.agents.environment.pool import WarmPool
from dora.agents.environment.protocol import End, Messages, Reply, Task
from dora.agents.environment.verdicts import ConversationDigest, VerdictCache
from dora.config import EnvironmentConfig
from dora.rewards.limits import UserLimits
from tests.unit.environment_classes import Echo
from tests.unit.test_driven_environments import FakeSession, attended, episodes, turn_of


@asynccontextmanager
async def pooled(make: Any, size: int, *, starting: int = 2, timeout_s: float = 30.0) -> AsyncIterator[WarmPool]:
    pool = WarmPool(make, size, asyncio.Semaphore(starting), timeout_s, Calls(grace_s=0.0), again_s=0.0)
    async with pool.filling():
        yield pool


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  (it looks at each turn of the loop)
            await asyncio.sleep(0)


class Sandbox(Echo):
    """Counts what its instances do. ``begun`` and ``closed`` are those of all."""

    begun = closed = together = most_together = 0
    broken: frozenset[int] = frozenset()  # the numbers of preparations that fail

    def __init__(self) -> None:
        self.is_prepared = False

    async def prepare(self) -> None:
        cls = type(self)
        number, cls.begun, cls.together = cls.begun, cls.begun + 1, cls.together + 1
        cls.most_together = max(cls.most_together, cls.together)
        await asyncio.sleep(0)
        cls.together -= 1
        if number in cls.broken:
            raise RuntimeError("no room")
        self.is_prepared = True

    async def reset(self, task: Task) -> Messages:
        assert self.is_prepared, "a session gets a prepared environment"
        return await super().reset(task)

    async def close(self) -> None:
        type(self).closed += 1


async def test_a_pool_stays_full_staggers_its_starts_and_closes_what_is_left() -> None:
    class Mine(Sandbox): ...

    async with pooled(Mine, 5) as pool:
        await until(lambda: pool.ready == 5)
        assert Mine.most_together == 2, "environment.starting"
        taken = pool.take()
        assert isinstance(taken, Mine) and taken.is_prepared
        await until(lambda: pool.ready == 5)
        assert (Mine.begun, Mine.closed) == (6, 0), "bounded: one for the one that was taken"
    assert Mine.closed == 5 and pool.take() is None


async def test_a_preparation_that_fails_or_hangs_is_replaced() -> None:
    class Failing(Sandbox):
        broken = frozenset({0, 1, 2})

    async with pooled(Failing, 2) as pool:
        await until(lambda: pool.ready == 2)
    assert (Failing.begun, Failing.closed) == (5, 5)

    class Hanging(Sandbox):
        async def prepare(self) -> None:
            await super().prepare()
            if type(self).begun == 1:
                await asyncio.Event().wait()

    async with pooled(Hanging, 1, starting=1, timeout_s=0.05) as pool:
        await until(lambda: pool.ready == 1)
    assert (Hanging.begun, Hanging.closed) == (2, 2)


async def test_sessions_take_from_the_pool_and_start_their_own_when_it_is_empty() -> None:
    class Mine(Sandbox): ...

    warm, cold = FakeSession(session_id="g0.0"), FakeSession(session_id="g0.1")
    async with pooled(Mine, 1) as pool:
        runs = replace(episodes(Mine), pool=pool)
        await until(lambda: pool.ready == 1)
        await runs.run(warm)
        assert warm.is_warm and warm.ended is not None
    await replace(episodes(Mine), pool=pool).run(cold)
    assert not cold.is_warm and cold.ended is not None


class Deaf(Echo):
    """Its second step ignores that it is cancelled, until ``heard``."""

    def __init__(self, heard: asyncio.Event) -> None:
        self.heard = heard

    async def step(self, reply: Reply) -> Messages | End:
        while reply.turn and not self.heard.is_set():
            try:
                await self.heard.wait()
            except asyncio.CancelledError:
                continue
        return await super().step(reply)


async def test_a_stuck_environment_is_left_behind_and_its_session_given_up() -> None:
    heard, calls = asyncio.Event(), Calls(grace_s=0.0)
    deaf, other = FakeSession(session_id="g0.0"), FakeSession(session_id="g0.1")
    await run_all(replace(episodes(lambda: Deaf(heard), timeout_s=0.05), calls=calls), deaf)
    assert "environment.timeout_s = 0.05" in deaf.failed and calls.stuck == 1
    await run_all(replace(episodes(Echo), calls=calls), other)
    assert other.ended is not None
    heard.set()
    await until(lambda: not calls.stuck)


async def run_all(runs: Episodes, *sessions: FakeSession) -> None:
    async def attend() -> Any:
        for session in sessions:
            yield session

    await Attending(runs.run, 1).run(attend)


async def test_calls_raise_what_their_call_raises() -> None:
    calls = Calls(grace_s=0.0)

    async def fails() -> None:
        raise RuntimeError("no")

    async def cancels() -> None:
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError):
        await calls.run(fails(), 1.0)
    with pytest.raises(EnvironmentFailed):
        await calls.run(cancels(), 1.0)
    with pytest.raises(TimeOver):
        await calls.run(asyncio.Event().wait(), 0.0)
    assert calls.stuck == 0


def test_a_process_with_too_many_stuck_calls_ends_itself() -> None:
    class Many(Calls):
        stuck = STUCK_MAX + 1

    limits = UserLimits(memory_mb=1 << 20, open_files=1 << 20, section="environment")  # this process has other tests
    assert "calls running" in Guard(limits, 60.0, Many()).reason()
    assert Guard(limits, 60.0, Calls()).reason() == ""


class Judged(Echo):
    """Deterministic, and counts its last steps."""

    deterministic = True
    judged = 0

    async def step(self, reply: Reply) -> Messages | End:
        type(self).judged += reply.turn == 2
        return await super().step(reply)


async def test_an_equal_conversation_is_judged_once_if_the_class_says_that_it_is_deterministic() -> None:
    class Mine(Judged): ...

    runs = replace(episodes(Mine), verdicts=VerdictCache(8))
    first, equal = FakeSession(), FakeSession(session_id="g0.1")
    others = [FakeSession(texts=("one", "2", "three")), FakeSession(prompt_text="xyz"), FakeSession(prompt_id="q")]
    for each in (first, equal, *others):
        await runs.run(each)
    assert equal.ended == first.ended and (first.is_cached, equal.is_cached) == (False, True)
    assert Mine.judged == 4 and not any(each.is_cached for each in others)

    class Random(Judged):
        deterministic = False

    for each in (FakeSession(), FakeSession()):
        await replace(episodes(Random), verdicts=VerdictCache(8)).run(each)
        assert not each.is_cached
    assert Random.judged == 2


def test_the_cache_is_bounded_and_keeps_what_was_used_last() -> None:
    cache = VerdictCache(EnvironmentConfig(verdicts=2).verdicts)
    cache.put(b"a", End(1.0))
    cache.put(b"b", End(2.0))
    assert cache.get(b"a") == End(1.0)
    cache.put(b"c", End(3.0))
    assert len(cache) == 2 and cache.get(b"b") is None and cache.get(b"a") and cache.get(b"c")
    nothing = VerdictCache(0)
    nothing.put(b"a", End(1.0))
    assert nothing.get(b"a") is None


def test_a_conversation_is_known_by_its_task_messages_and_tokens() -> None:
    def key(task: Task, *parts: Any) -> bytes:
        conversation = ConversationDigest(task)
        for each in parts:
            (conversation.replied if isinstance(each, Reply) else conversation.told)(each)
        return conversation.key()

    task, said = Task("p", verifier={"a": 1, "b": 2}), [{"role": "user", "content": "x"}]
    answer = Reply(0, "y", (1, 2), "stop")
    same = key(task, said, answer)
    assert key(replace(task, verifier={"b": 2, "a": 1}, session_id="g0.7"), said, replace(answer, text="z")) == same
    different = {
        key(replace(task, prompt_id="q"), said, answer), key(replace(task, text="t"), said, answer),
        key(task, [*said, *said], answer), key(task, said, replace(answer, token_ids=(1, 3))),
        key(task, said, replace(answer, finish_reason="length")), key(task, said), key(task, said, answer, said), same,
    }  # fmt: skip
    assert len(different) == 8


async def test_a_deterministic_environment_goes_on_with_a_session_of_another_process() -> None:
    session = FakeSession(turn=turn_of(2, [1]))
    await attended(Judged, session)
    assert session.rewound == 1 and session.ended is not None and not session.failed
    assert session.names == ["reset", "step", "step"], (
        "each turn is requested again, and the service repeats its tokens"
    )
