"""The shell's side of sessions: who gets a session, whose history a process has, and what the buffer keeps of turns."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from dora.config import RolloutConfig
from dora.core.state import IDLE, RUNNING, State
from dora.data.input_digest import beginning_digest, input_digest
from dora.data.token_spans import TokenSpan
from dora.data.types import Prompt
from dora.journal.content import LiveGroup
from dora.journal.durable import OPEN
from dora.journal.records import Tokens
from dora.orchestrator.rollout.environments import ATTENDEES_MAX, Environments
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.rpc.errors import LimitExceeded
from tests.refusals import refused
from tests.turn_orders import order
from tests.unit.journal.contents import requests_of
from tests.unit.test_accepted import reported

NAMES = [f"g0.{n}" for n in range(4)]
PROMPT = Prompt("p0", "", (1,), group_size=4, environment="tool")


class Shell:
    """A buffer with four sessions in rows 0 to 3, all of which run, and their journal's records."""

    def __init__(self) -> None:
        self.buffer = ResponseBuffer(RolloutConfig())
        self.buffer.admit("g0", PROMPT, 0, {name: row for row, name in enumerate(NAMES)}, 10.0)
        self.status = np.full(8, RUNNING)
        state = SimpleNamespace(request_id=dict(enumerate(NAMES)), requests={"status": self.status})
        self.environments = Environments(self.buffer, cast(State, state))
        self.records: list[Tokens] = []

    def grow(self, row: int) -> None:
        """This session has its first token."""
        accepted = self.buffer.accept("w0", 0, reported(TokenSpan(row, 0, (3,), (-1.0,), None)), 11.0)
        self.environments.reported(accepted)

    def turn(self, *rows: int, first: int = 0) -> None:
        """These sessions' turns of two tokens end."""
        spans = [TokenSpan(row, first, (3, 4), (-1.0, -2.0), "stop") for row in rows]
        self.status[list(rows)] = IDLE
        accepted = self.buffer.accept("w0", 0, reported(*spans), 11.0)
        record = accepted.record()
        assert record is not None
        self.records.append(record)
        self.environments.reported(accepted)

    def ask(self, row: int, *given: int) -> None:
        self.status[row] = RUNNING
        self.records.append(self.buffer.give(order(self.buffer.at(row), given, 9, "tool"), 12.0))

    def restored(self) -> ResponseBuffer:
        """The buffer that the records restore."""
        group = LiveGroup(0, "g0", PROMPT, 0, 0, 1, 10.0, (0, 1, 2, 3), 0, 0, OPEN, 0)
        buffer = ResponseBuffer(RolloutConfig())
        buffer.restore(group, 0, requests_of(group, self.records))
        return buffer


async def test_sessions_are_shared_and_handed_on() -> None:
    shell = Shell()
    shell.turn(0)
    with shell.environments.attending("tool") as first:
        assert await first.next() == "g0.0", "what waited already"
        with shell.environments.attending("tool") as second, shell.environments.attending("other") as other:
            shell.turn(1, 2)
            assert await second.next() == "g0.1"
            assert list(first.mine) == ["g0.0", "g0.2"] and list(second.mine) == ["g0.1"] and not other.mine
            shell.ask(1, 7)
            shell.turn(1, first=3)
            assert list(first.mine) == ["g0.0", "g0.2"], "the caller that asked has it"
        assert "g0.1" in first.mine, "the other has left"
        shell.environments.over("g0.1")
        assert "g0.1" not in first.mine


async def test_the_first_caller_gets_what_still_waits() -> None:
    shell = Shell()
    shell.turn(0, 1, 2)
    shell.environments.over("g0.1")
    shell.ask(2, 7)
    with shell.environments.attending("tool") as first:
        assert list(first.mine) == ["g0.0"]
        shell.turn(2, first=3)
        assert list(first.mine) == ["g0.0", "g0.2"]


async def test_the_first_caller_gets_what_an_earlier_service_left() -> None:
    shell = Shell()
    shell.status[[1, 3]] = IDLE
    shell.environments.restored()
    with shell.environments.attending("tool") as first:
        assert list(first.mine) == ["g0.1", "g0.3"]


async def test_callers_are_bounded() -> None:
    environments, entered = Shell().environments, []
    for _ in range(ATTENDEES_MAX):
        context = environments.attending("tool")
        context.__enter__()
        entered.append(context)
    with refused(LimitExceeded, field="environment: calls of Attend"), environments.attending("tool"):
        pass
    for context in entered:
        context.__exit__(None, None, None)


async def test_a_reader_is_woken_by_tokens_and_by_the_end() -> None:
    shell = Shell()
    with shell.environments.reading("g0.0") as changed:
        shell.turn(1)
        assert not changed.is_set()
        shell.turn(0)
        assert changed.is_set()
        changed.clear()
        shell.environments.over("g0.0")
        async with asyncio.timeout(5):
            await changed.wait()


async def test_a_reader_of_whole_turns_is_woken_by_their_end_alone() -> None:
    shell = Shell()
    with (
        shell.environments.reading("g0.0") as piece,
        shell.environments.reading("g0.0", whole_turns=True) as turn,
    ):
        shell.grow(0)
        assert piece.is_set() and not turn.is_set()
        shell.turn(0)
        assert turn.is_set()
        turn.clear()
        shell.environments.over("g0.0")
        assert turn.is_set()


@pytest.mark.parametrize(
    ("tokens", "runs", "goes_on"),
    [
        (4, [(2, 4)], True),  # it has the environment tokens, and samples
        (6, [(2, 4)], True),
        (2, [], True),  # it does not know yet that the turn was requested
        (3, [], False),
        (4, [], False),  # it sampled on, without what was given
        (4, [(2, 3)], False),
        (6, [(2, 4), (5, 6)], False),  # a turn that this service does not know
    ],
)
def test_a_process_continues_its_own_history_alone(tokens: int, runs: list[tuple[int, int]], goes_on: bool) -> None:
    shell = Shell()
    shell.turn(0)
    shell.ask(0, 7, 8)
    entry = shell.buffer.at(0)
    theirs = [*entry.tokens.tolist(), 9, 9]
    beginning, sampling = beginning_digest(PROMPT.token_ids), entry.turn_sampling(len(runs) and 1)
    assert entry.continues(tokens, input_digest(beginning, sampling, theirs, runs)) is goes_on
    assert not entry.continues(tokens, input_digest(beginning, sampling, [1] * 9, runs)) or not runs
    assert not entry.continues(tokens, input_digest(beginning_digest((2,)), sampling, theirs, runs))


def test_a_process_that_samples_the_turn_in_another_way_does_not_continue() -> None:
    """The service has lost the turn in a crash, and was asked it again with another temperature."""
    shell = Shell()
    shell.turn(0)
    entry, beginning = shell.buffer.at(0), beginning_digest(PROMPT.token_ids)
    before = entry.turn_sampling()
    asked = order(entry, (7, 8), 9, "tool", None, {"temperature": 0.5, "stop": ("a",)})
    shell.records.append(shell.buffer.give(asked, 12.0))
    mine = replace(before, max_tokens=9, temperature=0.5, stop=("a",))
    for after in (entry, shell.restored()["g0.0"]):
        assert after.spec().sampling == after.turn_sampling(1) == mine and after.turn_sampling(0) == before
        assert after.continues(5, input_digest(beginning, mine, [3, 4, 7, 8, 9], [(2, 4)]))
        assert not after.continues(
            5, input_digest(beginning, replace(mine, temperature=1.0), [3, 4, 7, 8, 9], [(2, 4)])
        )
        assert after.continues(2, input_digest(beginning, before, [3, 4], [])), "it does not know of the turn yet"


def test_a_process_of_another_branch_does_not_continue() -> None:
    shell = Shell()
    shell.turn(0)
    entry = shell.buffer.at(0)
    beginning, left = beginning_digest(PROMPT.token_ids), entry.sampling
    assert entry.continues(2, input_digest(beginning, left, entry.tokens, []))
    shell.records.append(shell.buffer.give(order(entry, (7, 8), 9, "tool", (0, 1)), 12.0))
    for tokens, runs in ((1, []), (2, []), (3, [(1, 3)]), (9, [(1, 3)])):
        assert not entry.continues(tokens, input_digest(beginning, left, [3, 7, 8, *range(9)], runs)), (
            "its seed is another"
        )
    assert entry.continues(3, input_digest(beginning, entry.turn_sampling(), entry.tokens, [(1, 3)]))


def test_the_log_has_turns_ends_and_attempts() -> None:
    shell = Shell()
    shell.turn(0, 1, 2)
    shell.ask(0, 7, 8)
    shell.turn(0, first=4)
    shell.ask(0, 5)
    shell.records.append(shell.buffer.close(shell.buffer.at(1), 13.0))
    shell.records.append(shell.buffer.substitute("g0.2", "g0.2~1", 14.0))
    again = shell.restored()
    for before in (*shell.buffer._groups["g0"],):
        after = again[before.request_id]
        assert replace(before, window_versions=0, finished_at=0.0) == replace(after, window_versions=0, finished_at=0.0)
    assert again["g0.0"].input_bounds() == [(2, 4), (6, 7)] and again["g0.1"].is_closed
    spec: Any = again["g0.0"].spec()
    assert (spec.inputs, spec.keeps, spec.sampling.max_tokens, spec.pending) == (((2, 4), (6, 7)), True, 9, 1)
    assert not len(again["g0.2~1"]) and again["g0.2~1"].sampling.seed != shell.buffer["g0.3"].sampling.seed


def test_records_in_another_order_and_twice_say_the_same() -> None:
    """As after a compaction that was cut short."""
    shell = Shell()
    shell.turn(0, 2)
    shell.ask(0, 7, 8)
    shell.records.append(shell.buffer.substitute("g0.2", "g0.2~1", 14.0))
    shell.turn(0, first=4)
    expected = {each.request_id: each.tokens.tolist() for each in shell.restored()._groups["g0"]}
    shell.records = [*reversed(shell.records), *shell.records]
    assert {each.request_id: each.tokens.tolist() for each in shell.restored()._groups["g0"]} == expected
