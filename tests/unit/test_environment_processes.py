"""Processes of a user's environments: whatever one does to its own, sessions of others go on and are not charged."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from dora.agents.environment.attending import Attending, Failing
from dora.agents.environment.processes import Processes
from dora.agents.environment.protocol import Task
from dora.config import EnvironmentConfig
from dora.errors import InvalidValue
from tests.refusals import refused
from tests.sweeps import some_of
from tests.unit import environment_classes
from tests.unit.test_driven_environments import FakeSession, episodes

HERE = environment_classes.__name__
FAULTS = [(method, how) for method in ("reset", "step", "task") for how in ("leaves", "crashes", "is killed")]
SHORT = [("reset", "leaves"), ("step", "crashes"), ("task", "is killed")]


@asynccontextmanager
async def processes(name: str = "Faulty", **settings: Any) -> AsyncIterator[Processes]:
    found = Processes(EnvironmentConfig(spec=f"{HERE}:{name}", **settings))
    try:
        await found.shared()
        yield found
    finally:
        await found.stop()


async def attended(found: Processes, *sessions: FakeSession, at_once: int = 8) -> None:
    async def attend() -> AsyncGenerator[Failing]:
        for session in sessions:
            yield session

    own = replace(episodes(found.make, found.settings.timeout_s), alone=found.alone)
    await Attending(own.run, at_once).run(attend)


def faulty(number: int, what: str, prompt: str = "") -> FakeSession:
    return FakeSession(session_id=f"g{number}.0", prompt_id=prompt or f"p{number}", prompt_text=what)


class Waiting(FakeSession):
    """Its turn ends when the faulty session has failed: it waits for the policy at that moment."""

    def __init__(self, faulty: FakeSession) -> None:
        super().__init__(session_id="g9.0", prompt_id="p9", prompt_text="behaves")
        self.faulty = faulty

    async def ask(self, *arguments: Any, **about: Any) -> Any:
        while not self.faulty.failed:  # noqa: ASYNC110  (another session sets it)
            await asyncio.sleep(0.01)
        return await super().ask(*arguments, **about)


async def test_the_start_of_a_process_is_not_its_sessions_time() -> None:
    found = Processes(EnvironmentConfig(spec="tests.unit.environment_slow:Echo", timeout_s=2.0))
    session = faulty(1, "behaves")
    try:
        await attended(found, session)
    finally:
        await found.stop()
    assert session.ended is not None and not session.failed


@pytest.mark.parametrize(
    ("method", "how"), [pytest.param(*each, marks=() if each in SHORT else pytest.mark.full) for each in FAULTS]
)
async def test_a_session_that_ends_its_process_is_charged_alone(method: str, how: str) -> None:
    """Its neighbour, which waits for the policy, goes on in the next process, or is replaced without a charge."""
    bad = faulty(1, f"{method} {how}")
    neighbour = Waiting(bad)
    async with processes() as found:
        await attended(found, bad, neighbour)
    assert bad.fault == "session" and bad.ended is None
    assert (
        "prompt p1" in bad.failed
        and {"leaves": "exit status 4", "crashes": "signal 11"}.get(how, "signal 9") in bad.failed
    )
    if how != "is killed":
        assert "misbehave" in bad.failed or "string_at" in bad.failed, "a line of the stack"
    assert neighbour.ended is not None or neighbour.fault == "another"


@pytest.mark.parametrize("method", some_of(("reset", "step", "task"), "step"))
async def test_an_exit_is_an_error_of_its_session_and_ends_no_process(method: str) -> None:
    bad, neighbour = faulty(1, f"{method} exits"), faulty(2, "behaves")
    async with processes() as found:
        before = await found.shared()
        await attended(found, bad, neighbour)
        assert await found.shared() is before
    assert "SystemExit: 3 (environment_classes.py:" in bad.failed and bad.fault == "session"
    assert neighbour.ended is not None and not neighbour.failed


async def test_a_call_that_blocks_is_named_with_its_line_and_neighbours_are_not_charged() -> None:
    bad, neighbours = faulty(1, "step blocks"), [faulty(number, "behaves") for number in range(2, 6)]
    async with processes(timeout_s=12.0) as found:
        await attended(found, *neighbours, bad)
    assert bad.fault == "session" and "blocked the event loop" in bad.failed
    assert '"unit/environment_classes.py", line ' in bad.failed and bad.failed.endswith(" in misbehave")
    for each in neighbours:
        assert each.ended is not None or each.fault == "another", each.failed


async def test_a_prompt_that_ended_the_shared_process_runs_alone_and_is_cancelled_after_two_more() -> None:
    async with processes() as found:
        first = faulty(1, "reset leaves", "p")
        await attended(found, first)
        shared = await found.shared()
        again = [faulty(number, "reset leaves", "p") for number in (2, 3)]
        neighbour = faulty(4, "behaves")
        await attended(found, *again, neighbour, at_once=1)
        assert await found.shared() is shared, "in its own processes it ends no other"
        well = faulty(5, "behaves", "p")
        await attended(found, well)
    assert [each.fault for each in (first, *again)] == ["session", "session", "prompt"]
    assert neighbour.ended is not None and well.ended is not None


async def test_suspects_run_alone_after_the_second_end_and_others_start_anew() -> None:
    """Nobody's code runs when the process is killed from outside: those with a call under way are suspects."""
    async with processes("Sleeper") as found:
        session = FakeSession(prompt_id="p")
        running = asyncio.create_task(attended(found, session))
        ended = []
        for _ in range(2):
            process = await found.shared()
            async with asyncio.timeout(60):
                while not any(each.task.prompt_id for each, _ in process._asked.values()):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            process._kill()
            await asyncio.wait({process.over})
            ended.append(process)
        async with asyncio.timeout(60):
            while not await found.alone(Task("p")):
                pass
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert not session.failed and len({*ended}) == 2


async def test_a_deterministic_environment_goes_on_in_the_next_process() -> None:
    bad = faulty(1, "step leaves")
    neighbour = Waiting(bad)
    async with processes("Replayed") as found:
        await attended(found, bad, neighbour)
    assert neighbour.ended is not None and neighbour.rewound == 1 and not neighbour.failed


async def test_a_class_that_does_not_load_is_refused() -> None:
    with refused(InvalidValue, field="--environment"):
        async with processes("NotAsync"):
            pass


async def test_results_are_those_of_the_class() -> None:
    async with processes("Odd") as found:
        odd = FakeSession()
        await attended(found, odd)
    assert odd.ended == (1.5, {"1": 2.0, "b": 0.5}, {1: 0.5, 2: 0.5, 3: 0.5}, "turn 2"), odd.failed
    async with processes("Wrong") as found:
        wrong = FakeSession()
        await attended(found, wrong)
    assert "step() = {'role': 'user'}" in wrong.failed


async def test_prints_come_at_once_with_their_session(capfd: pytest.CaptureFixture[str]) -> None:
    one, other = faulty(1, "step leaves"), faulty(2, "behaves")
    async with processes() as found:
        await attended(found, one, other)
    said = capfd.readouterr().err.splitlines()
    assert {"g1.0: step leaves begins", "g2.0: behaves begins"} <= set(said)
