"""The tokens of a report: packed and unpacked, gathered by a worker, and asked for no more often than can be read."""

import random
from collections import deque
from pathlib import Path

import numpy as np
import pytest

from dora.data.token_spans import TokenSpan
from dora.data.types import EngineCapability, RequestSpec, SamplingParams, TokenDelta
from dora.errors import InvalidValue
from dora.orchestrator.rollout.streams import MemberSessions
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from dora.rpc.columns import columns_from_wire, columns_to_wire
from dora.worker.fake.engine import FakeEngine
from dora.worker.gathering import Gathering
from dora.worker.loop import EngineLoop
from tests.contract.workers import anywhere
from tests.refusals import data_words, refused

CAPABILITY = EngineCapability("f", 8, 4096, 32, 256, 64, "float32")


def spans(seed: int) -> list[TokenSpan]:
    chance = random.Random(seed)
    made = []
    for row in chance.sample(range(1 << 32), chance.randrange(6)):
        count = chance.randrange(5)
        logprobs = np.array([-chance.random() for _ in range(count)], np.float32).tolist()
        finish = chance.choice((None, None, "stop", "length"))
        stop = chance.choice(("", "</answer> é")) if finish == "stop" else ""
        token_ids = tuple(chance.randrange(1 << 31) for _ in range(count))
        routed = chance.randbytes(6 * count * (seed % 2))
        made.append(TokenSpan(row, chance.randrange(1 << 32), token_ids, tuple(logprobs), finish, stop, routed))
    return made


@pytest.mark.parametrize("seed", range(20))
def test_columns_unpack_to_what_was_packed(seed: int) -> None:
    packed = pb.WorkerReport(tokens=columns_to_wire(spans(seed)))
    assert list(columns_from_wire(pb.WorkerReport.FromString(packed.SerializeToString()).tokens)) == spans(seed)


def test_columns_are_little_endian_arrays_that_show_the_message() -> None:
    message = columns_to_wire([TokenSpan(258, 1, (7,), (-0.5,)), TokenSpan(3, 0, (8, 9), (-1.0, -2.0), "length")])
    assert message.rows == b"\2\1\0\0\3\0\0\0" and message.counts == b"\1\0\0\0\2\0\0\0" and message.ends == b"\0\2"
    columns = columns_from_wire(message)
    assert columns.begins.tolist() == [0, 1] and columns.token_ids.tolist() == [7, 8, 9]
    assert not columns.token_ids.flags.owndata, "no token is copied"


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (pb.TokenColumns(rows=b"\0" * 3), "rows: bytes = 3 .*multiple of 4"),
        (pb.TokenColumns(rows=b"\0" * 4, counts=b"\0" * 4), "first_tokens = 0 .*that is 1"),
        (pb.TokenColumns(rows=b"\0" * 4, counts=b"\0" * 4, first_tokens=b"\0" * 4, ends=b"\0\0"), "ends = 2"),
        (pb.TokenColumns(rows=b"\0" * 4, counts=b"\0" * 4, first_tokens=b"\0" * 4, ends=b"\7"), "ends = 7"),
        (pb.TokenColumns(token_ids=b"\0" * 4, logprobs=b"\0" * 4), "token_ids = 1 .*0, as many as the stretches have"),
        (pb.TokenColumns(rows=b"\0" * 8, counts=b"\0" * 8, first_tokens=b"\0" * 8), "rows = 0 .*each row once"),
        (pb.TokenColumns(routed_experts=b"\0"), "routed_experts: bytes = 1 .*0, as many"),
        (pb.TokenColumns(stops=[pb.StopCompleted(stop="a")]), "stops = .*each of another stretch"),
        (pb.TokenColumns(prompt_logprobs=[pb.PromptLogprobs()]), "prompt_logprobs = .*each of another stretch"),
    ],
)
def test_columns_that_do_not_fit_each_other_are_refused(message: pb.TokenColumns, complaint: str) -> None:
    with refused(InvalidValue, names=data_words(complaint)):
        columns_from_wire(message)


def test_tokens_of_one_request_are_gathered_into_one_stretch() -> None:
    gathering = Gathering()
    gathering.name("a", 5)
    gathering.name("b", 9)
    gathering.add([TokenDelta("a", 3, 0, (1,), (-1.0,)), TokenDelta("b", 3, 4, (2,), (-1.0,))])
    assert not gathering.takes([TokenDelta("a", 4, 1, (3,), (-1.0,))]), "of another version"
    gathering.add([TokenDelta("a", 3, 1, (3,), (-2.0,), "stop", "x")])
    assert gathering.has_ends and "a" in gathering
    (taken,) = gathering.take()
    assert list(columns_from_wire(taken)) == [
        TokenSpan(5, 0, (1, 3), (-1.0, -2.0), "stop", "x"),
        TokenSpan(9, 4, (2,), (-1.0,)),
    ]
    assert not gathering and not gathering.take()


def test_what_is_too_much_for_one_message_is_reported_in_several() -> None:
    gathering = Gathering()
    for row in range(5):
        gathering.name(f"r{row}", row)
        gathering.add([TokenDelta(f"r{row}", 0, 0, (1,), (-1.0,), routed_experts=bytes(200 << 10))])
    taken = gathering.take()
    assert [[span.row for span in columns_from_wire(each)] for each in taken] == [[0, 1], [2, 3], [4]]


class Line:
    """A worker's loop, to which a test gives commands and its time, and what it says."""

    def __init__(self, model: Path, period_ms: int) -> None:
        self.now_s = 0.0
        self.waiting: deque[pb.WorkerCommand] = deque()
        self.said: list[pb.WorkerMessage] = []
        engine = FakeEngine(slots=8, kv_tokens=4096, max_model_len_tokens=256, model=model)
        welcome = pb.Welcome(epoch=1, report_period_ms=period_ms)
        self.loop = EngineLoop(engine, self, welcome, None, lambda: self.now_s, anywhere)
        self.obey(load_version=pb.LoadVersion(name=str(model)))

    def take(self, _timeout_s: float) -> pb.WorkerCommand | None:
        return self.waiting.popleft() if self.waiting else None

    def send(self, message: pb.WorkerMessage) -> None:
        self.said.append(message)

    def obey(self, **kind: object) -> None:
        self.waiting.append(pb.WorkerCommand(command_id=1, **kind))

    def start(self, row: int, tokens: int) -> None:
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=row)
        order = convert.request_to_wire(RequestSpec(f"r{row}", 0, (1, 2), sampling))
        order.row = row
        self.obey(start_request=order)

    def turns(self, count: int, turn_s: float) -> list[list[TokenSpan]]:
        """The reports of tokens that so many turns make, each ``turn_s`` after the one before."""
        self.said.clear()
        for _ in range(count):
            self.loop.turn()
            self.now_s += turn_s
        reports = [message.report for message in self.said if message.HasField("report")]
        return [list(columns_from_wire(report.tokens)) for report in reports if report.tokens.rows]


def test_tokens_are_reported_once_a_period_and_an_end_within_a_twentieth_of_a_second(tiny_dense: Path) -> None:
    line = Line(tiny_dense, period_ms=1000)
    line.start(3, 200)
    line.start(4, 10)
    (ended,) = line.turns(99, 0.01)
    assert [(span.row, span.finish_reason, len(span.token_ids)) for span in ended] == [(4, "length", 10)]
    line.start(5, 200)
    ((running, begun),) = line.turns(2, 0.01)
    assert (running.row, running.first_token, len(running.token_ids)) == (3, 0, 101), "what still runs has its period"
    assert (begun.row, begun.first_token) == (5, 0), "and is not reported earlier as another one begins"
    line.obey(pace=pb.Pace(report_period_ms=100))
    assert len(line.turns(50, 0.01)) == 5, "told to report more often"


def test_what_ends_last_is_reported_at_once(tiny_dense: Path) -> None:
    line = Line(tiny_dense, period_ms=1000)
    line.start(3, 4)
    line.turns(4, 0.001)
    (message,) = [each for each in line.said if each.report.tokens.rows]
    assert next(iter(columns_from_wire(message.report.tokens))).finish_reason == "length"


def test_many_workers_are_asked_to_report_less_often() -> None:
    sessions = MemberSessions(lambda _session, _reason: None)
    joined = [sessions.open(f"w{index}", 1, "host", CAPABILITY) for index in range(12)]
    assert sessions.report_period_ms == 50
    joined.append(sessions.open("w12", 1, "host", CAPABILITY))
    assert sessions.report_period_ms == 100
    assert joined[0]._outbox.get_nowait().pace.report_period_ms == 100
    joined += [sessions.open(f"v{index}", 1, "host", CAPABILITY) for index in range(1500)]
    assert sessions.report_period_ms == 4000, "and no less than once in four seconds"
    for session in joined[12:]:
        sessions.lose(session, "gone")
    assert sessions.report_period_ms == 50
