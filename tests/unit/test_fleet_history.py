"""The fleet's history: who gets what others sampled, once, within a bound."""

import numpy as np

from dora.config import RolloutConfig
from dora.data.remembered import PROMPT_TOKENS, scope_of, task_scope_of
from dora.data.token_spans import TokenSpan
from dora.data.types import EngineCapability, Prompt
from dora.orchestrator.rollout.history import ENTRY_BYTES, RESPONSES_MAX, FleetHistory
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.orchestrator.rollout.streams import MemberSessions, WorkerSession
from dora.rpc import dora_pb2 as pb
from dora.rpc.columns import columns_from_wire, columns_to_wire
from tests.turn_orders import order

CAPABILITY = EngineCapability("f", 8, 4096, 32, 256, 64, "float32")
MIB = 1 << 20


class Fleet:
    """Workers w0 and w1, and groups of two responses of prompts that are named by their tokens."""

    def __init__(self, most_bytes: int = MIB) -> None:
        self.buffer = ResponseBuffer(RolloutConfig())
        self.sessions = MemberSessions(lambda *_: None, None, 50)
        self.history = FleetHistory(self.buffer, self.sessions, most_bytes)
        self.rows = 0
        for name in ("w0", "w1"):
            self.join(name)

    def join(self, name: str) -> WorkerSession:
        session = self.sessions.workers[name] = WorkerSession(name, 1, 7, "host", CAPABILITY)
        return session

    def admit(self, group: str, token_ids: tuple[int, ...], environment: str = "") -> None:
        prompt = Prompt(group, "task", token_ids, group_size=2, environment=environment)
        rows = {f"{group}.{member}": self.rows + member for member in range(2)}
        self.rows += 2
        self.buffer.admit(group, prompt, 0, rows, 1.0)

    def start(self, name: str, request_id: str) -> None:
        self.buffer.arrives(request_id, name, "started")
        self.history.introduce(self.sessions.workers[name], request_id)

    def end(self, name: str, request_id: str, token_ids: tuple[int, ...], first: int = 0) -> None:
        row = self.buffer[request_id].row
        span = TokenSpan(row, first, token_ids, (-0.5,) * len(token_ids), "stop")
        self.buffer.accept(name, 0, columns_from_wire(columns_to_wire([span])), 1.0)
        self.history.ended(self.sessions.workers[name], [request_id])

    def told(self, name: str) -> list[tuple[bytes, bytes, list[int]]]:
        """What a worker was sent since the last call."""
        found: list[pb.WorkerCommand] = []
        outbox = self.sessions.workers[name]._outbox
        while not outbox.empty():
            command = outbox.get_nowait()
            assert command is not None and command.HasField("remember")
            found.append(command)
        return [
            (each.scope, each.task, np.frombuffer(each.token_ids, "<i4").tolist())
            for command in found
            for each in command.remember.responses
        ]


def test_a_sibling_elsewhere_gets_a_response_and_the_one_that_sampled_it_does_not() -> None:
    fleet = Fleet()
    fleet.admit("g0", (1, 2))
    fleet.start("w0", "g0.0")
    fleet.start("w1", "g0.1")
    fleet.end("w0", "g0.0", (5, 6, 7))
    assert fleet.told("w1") == [(scope_of((1, 2)), b"", [1, 2, 5, 6, 7])]
    assert fleet.told("w0") == []


def test_a_later_epoch_of_a_prompt_begins_with_what_its_worker_lacks() -> None:
    fleet = Fleet()
    fleet.admit("g0", (1, 2))
    fleet.start("w0", "g0.0")
    fleet.end("w0", "g0.0", (5, 6, 7))
    fleet.admit("g1", (1, 2))
    fleet.admit("g2", (9,))
    fleet.start("w1", "g2.0")
    assert fleet.told("w1") == []
    fleet.start("w1", "g1.0")
    assert [token_ids for _, _, token_ids in fleet.told("w1")] == [[1, 2, 5, 6, 7]]
    fleet.start("w1", "g1.1")
    assert fleet.told("w1") == []
    fleet.start("w0", "g0.1")
    assert fleet.told("w0") == []


def test_a_worker_that_starts_again_is_told_again() -> None:
    fleet = Fleet()
    fleet.admit("g0", (1, 2))
    fleet.start("w0", "g0.0")
    fleet.end("w0", "g0.0", (5, 6, 7))
    fleet.join("w0")
    fleet.start("w0", "g0.1")
    assert [token_ids for _, _, token_ids in fleet.told("w0")] == [[1, 2, 5, 6, 7]]


def test_sessions_of_a_task_share_their_turns() -> None:
    fleet = Fleet()
    fleet.admit("g0", (1, 2), "tool")
    fleet.admit("g1", (3, 4), "tool")
    fleet.start("w0", "g0.0")
    task = task_scope_of("task")
    assert fleet.told("w0") == [(scope_of((1, 2)), task, [])]
    fleet.start("w1", "g1.0")
    fleet.told("w1")
    fleet.end("w0", "g0.0", (5, 6, 7))
    assert fleet.told("w1") == [(scope_of((1, 2)), task, [1, 2, 5, 6, 7])]
    fleet.buffer.give(order(fleet.buffer["g0.0"], (8, 9), 8, "tool"), 2.0)
    fleet.end("w0", "g0.0", (10, 11), 5)
    assert fleet.told("w1") == [(scope_of((1, 2)), task, [1, 2, 5, 6, 7, 8, 9, 10, 11])]


def test_the_latest_responses_are_kept_within_the_bound() -> None:
    fleet = Fleet(most_bytes=8 * (ENTRY_BYTES + 4 * 40))
    for number in range(30):
        group = f"g{number}"
        fleet.admit(group, tuple(range(number, number + 60)))
        fleet.start("w0", f"{group}.0")
        fleet.end("w0", f"{group}.0", (5, 6, 7))
        assert fleet.history.size_bytes <= 8 * (ENTRY_BYTES + 4 * 40)
    fleet.admit("again", tuple(range(29, 89)))
    fleet.start("w1", "again.0")
    ((_, _, token_ids),) = fleet.told("w1")
    assert token_ids == [*range(89 - PROMPT_TOKENS, 89), 5, 6, 7]
    fleet.admit("old", tuple(range(60)))
    fleet.start("w1", "old.0")
    assert fleet.told("w1") == []


def test_of_one_prompt_the_latest_are_kept() -> None:
    fleet = Fleet()
    for number in range(RESPONSES_MAX):
        fleet.admit(f"g{number}", (1, 2))
        for member in range(2):
            fleet.start("w0", f"g{number}.{member}")
            fleet.end("w0", f"g{number}.{member}", (number, member))
    fleet.start("w1", "g0.0")
    found = [token_ids for _, _, token_ids in fleet.told("w1")]
    assert len(found) == RESPONSES_MAX
    assert found[-1] == [1, 2, RESPONSES_MAX - 1, 1]


def test_without_speculation_nothing_is_kept_or_told() -> None:
    fleet = Fleet(most_bytes=0)
    fleet.admit("g0", (1, 2))
    fleet.start("w0", "g0.0")
    fleet.start("w1", "g0.1")
    fleet.end("w0", "g0.0", (5, 6, 7))
    assert (fleet.told("w0"), fleet.told("w1"), fleet.history.size_bytes) == ([], [], 0)
