"""A worker that lies, is broken or is none: it is refused with a reason, and nothing of it reaches a trainer."""

import asyncio
import math
import random
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

import dora
from dora.client import Operator
from dora.data.trajectory import TrajectoryGroup
from dora.data.types import TokenDelta
from dora.errors import MISSING, Conflict, InvalidValue
from dora.orchestrator.main import ServiceHandle
from dora.orchestrator.rollout.responses.state import ReportError
from dora.orchestrator.rollout.worker_checks import checked_hello
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from dora.rpc import dora_pb2_grpc as stubs
from dora.rpc.columns import columns_from_wire, columns_to_wire
from dora.rpc.errors import from_rpc_error
from dora.rpc.proven import proven_channel
from dora.rpc.roles import Role
from dora.worker.fake.engine import FakeEngine
from dora.worker.loop import EngineLoop
from tests.abuse.generated import hostile
from tests.refusals import data_words, refused
from tests.service import check_promises, configured, running
from tests.unit.test_runtime import Shell, ended

GROUPS = 4
VOCABULARY = 64
MAX_TOKENS = 48

Tamper = Callable[[pb.WorkerMessage], None]


class Orders:
    """The messages that wait for the engine's loop, and its answers."""

    def __init__(self) -> None:
        self.waiting: deque[pb.WorkerCommand] = deque()
        self.said: list[pb.WorkerMessage] = []

    def take(self, _timeout_s: float) -> pb.WorkerCommand | None:
        return self.waiting.popleft() if self.waiting else None

    def send(self, message: pb.WorkerMessage) -> None:
        self.said.append(message)


async def said_to(handle: ServiceHandle, name: str, model: Path, tamper: Tamper) -> Exception:
    """Runs a worker of which ``tamper`` may change each message; how the service ended its stream."""
    engine = FakeEngine(slots=8, kv_tokens=4096, max_model_len_tokens=256, model=model)
    orders = Orders()
    outbox: asyncio.Queue[pb.WorkerMessage] = asyncio.Queue()
    lied = False

    def say(message: pb.WorkerMessage) -> None:
        nonlocal lied
        honest = message.SerializeToString()
        tamper(message)
        if not lied:  # gRPC may lose the reason where the other side is still sending
            outbox.put_nowait(message)
        lied = lied or message.SerializeToString() != honest

    async def messages() -> AsyncIterator[pb.WorkerMessage]:
        while True:
            yield await outbox.get()

    async with proven_channel(handle.address, handle.tokens[Role.WORKER]) as channel:
        say(pb.WorkerMessage(hello=convert.hello_to_wire(name, 1, "host", engine.capability)))
        commands = aiter(stubs.WorkerStub(channel).Connect(messages()))
        try:
            loop = EngineLoop(engine, orders, (await anext(commands)).welcome, clock=iter(range(1 << 40)).__next__)
            while True:
                reading = asyncio.ensure_future(anext(commands))
                while not reading.done():
                    if not lied:
                        loop.turn()
                        for message in orders.said:
                            say(message)
                        orders.said.clear()
                    if lied or not engine.has_work():
                        await asyncio.wait({reading})
                    else:
                        await asyncio.sleep(0)
                orders.waiting.append(reading.result())
        except stubs.grpc.aio.AioRpcError as error:
            return from_rpc_error(error)


def of_tokens(change: Callable[[pb.TokenColumns], None]) -> Tamper:
    """Changes the tokens of each report that has any."""

    def tamper(message: pb.WorkerMessage) -> None:
        if message.report.tokens.rows:
            change(message.report.tokens)

    return tamper


def with_spans(**changes: Any) -> Tamper:
    """Changes every request's part of a report."""

    def change(tokens: pb.TokenColumns) -> None:
        tokens.CopyFrom(columns_to_wire(replace(each, **changes) for each in columns_from_wire(tokens)))

    return of_tokens(change)


def twice(tokens: pb.TokenColumns) -> None:
    tokens.CopyFrom(columns_to_wire(each for each in columns_from_wire(tokens) for _ in range(2)))


def without_counts(tokens: pb.TokenColumns) -> None:
    tokens.counts = bytes(len(tokens.counts))


def of(kind: str, **changes: Any) -> Tamper:
    """Sets fields of every message of this kind."""

    def tamper(message: pb.WorkerMessage) -> None:
        if message.WhichOneof("kind") == kind:
            for name, value in changes.items():
                setattr(getattr(message, kind), name, value)

    return tamper


def canary_of_nan(message: pb.WorkerMessage) -> None:
    if message.outcome.canary.logprobs:
        logprobs = [math.nan] * (len(message.outcome.canary.logprobs) // 4)
        message.outcome.canary.logprobs = convert._bytes(logprobs, convert._FLOAT32)


LIES: dict[str, tuple[Tamper, str]] = {
    "NaN logprobs": (with_spans(logprobs=(math.nan,), token_ids=(3,)), "logprobs = nan"),
    "infinite logprobs": (with_spans(logprobs=(-math.inf,), token_ids=(3,)), "logprobs = -inf"),
    "positive logprobs": (with_spans(logprobs=(0.5,), token_ids=(3,)), r"logprobs = 0\.5"),
    "foreign token": (with_spans(token_ids=(VOCABULARY,), logprobs=(-1.0,)), "token_ids = 64"),
    "negative token": (with_spans(token_ids=(-1,), logprobs=(-1.0,)), "token_ids = -1"),
    "too many tokens": (
        with_spans(token_ids=(3,) * 100_000, logprobs=(-1.0,) * 100_000),
        "at most max_tokens, 48",
    ),
    "a gap": (with_spans(first_token=1 << 31), "first token = 2147483648"),
    "no logprobs": (of_tokens(lambda tokens: tokens.ClearField("logprobs")), "as many as the stretches have"),
    "an end of nothing": (
        with_spans(token_ids=(), logprobs=(), finish_reason="stop"),
        "at least one where it has ended",
    ),
    "an unknown end": (of_tokens(lambda tokens: setattr(tokens, "ends", b"\3" * (len(tokens.rows) // 4))), "ends = 3"),
    "half a row": (of_tokens(lambda tokens: setattr(tokens, "rows", b"\0\0")), "rows: bytes = 2"),
    "a row of nobody": (with_spans(row=(1 << 32) - 1), "rows = 4294967295"),
    "a row twice": (of_tokens(twice), "each row once"),
    "no counts": (of_tokens(without_counts), "as many as the stretches have"),
    "counts without end": (
        of_tokens(lambda tokens: setattr(tokens, "counts", b"\xff" * len(tokens.counts))),
        "as many as the stretches have",
    ),
    "a stop of none": (
        of_tokens(lambda tokens: tokens.stops.append(pb.StopCompleted(span=1 << 20, stop="a"))),
        "stops",
    ),
    "a stop that nobody asked for": (
        of_tokens(lambda tokens: tokens.stops.append(pb.StopCompleted(span=0, stop="a"))),
        "one of its stop strings",
    ),
    "KV beyond its own": (of("report", kv_used_tokens=(1 << 64) - 1), "kv_used_tokens"),
    "counters": (of("report", generated_tokens=(1 << 64) - 1), "generated_tokens"),
    "a path for a locator": (of("outcome", locator="../../etc/passwd"), "locator"),
    "another's locator": (of("outcome", locator=f"0-{'0' * 32}.kv"), "locator"),
    "an unknown kind of error": (of("outcome", error_kind="bored"), "error_kind = 'bored'"),
    "a difference of NaN": (of("outcome", canary_difference=math.nan), "canary_difference = nan"),
    "a difference below 0": (of("outcome", canary_difference=-1.0), r"canary_difference = -1\.0"),
    "an unknown transport": (of("outcome", kv_transport="pigeon"), "kv_transport = 'pigeon'"),
    "bytes without end": (of("outcome", snapshot_bytes=(1 << 64) - 1), "snapshot_bytes"),
    "a canary of NaN": (canary_of_nan, "are the weights finite"),
    "nothing": (lambda message: message.ClearField("outcome"), "kind = None"),
}
LONG: Final = "h" * 508 + " ..."  # as errors travel
HELLOS: dict[str, tuple[Tamper, str, object]] = {
    "no slots": (of("hello", slots=0), "slots", 0),
    "slots": (of("hello", slots=(1 << 32) - 1), "slots", (1 << 32) - 1),
    "no KV": (of("hello", kv_tokens=0), "kv_tokens", 0),
    "KV": (of("hello", kv_tokens=(1 << 64) - 1), "kv_tokens", (1 << 64) - 1),
    "blocks": (of("hello", block_tokens=0), "block_tokens", 0),
    "context": (of("hello", max_model_len_tokens=255), "max_model_len_tokens", 255),
    "long context": (of("hello", max_model_len_tokens=(1 << 32) - 1), "max_model_len_tokens", (1 << 32) - 1),
    "vocabulary": (of("hello", vocab_size=1 << 31), "vocab_size", 1 << 31),
    "name": (of("hello", worker_id="../w"), "worker_id", "../w"),
    "long name": (of("hello", worker_id="w" * 65), "worker_id", "w" * 65),
    "host": (of("hello", host="h" * 100_000), "host", LONG),
    "long address": (of("hello", kv_address="h" * 100_000), "kv_address", LONG),
    "no fingerprint": (of("hello", fingerprint=""), "fingerprint", ""),
    "no hello": (lambda message: message.ClearField("hello"), "hello", MISSING),
}


async def take_steps(trainer: dora.Trainer, weights: Path, enough: asyncio.Event) -> list[list[TrajectoryGroup]]:
    steps = []
    async for step in trainer.steps(groups=GROUPS):
        steps.append([group async for group in step])
        await step.commit(weights=weights, wait=True)
        if enough.is_set():
            break
    return steps


async def test_what_a_worker_sampled_is_checked_before_it_is_believed(tiny_dense: Path) -> None:
    """Every lie is refused with its reason while a trainer goes on, whose groups are whole and what engines sample."""
    config = configured(tiny_dense, workers__engine="fake", workers__count=1, workers__report_period_ms=1)
    enough = asyncio.Event()
    async with (
        running(config) as handle,
        Operator(handle.address, handle.token) as operator,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        training = asyncio.create_task(take_steps(trainer, tiny_dense, enough))
        for number, (name, (tamper, reason)) in enumerate(LIES.items()):
            error = await said_to(handle, f"liar{number}", tiny_dense, tamper)
            with refused(InvalidValue, names=data_words(reason)):
                raise error
            assert not training.done(), name
        for number, (tamper, field, value) in enumerate(HELLOS.values()):
            with refused(InvalidValue, field=field, value=value):
                raise await said_to(handle, f"stranger{number}", tiny_dense, tamper)
        stranger = await said_to(handle, "stranger", tiny_dense, of("hello", fingerprint="f" * 64))
        true = FakeEngine(slots=8, kv_tokens=4096, max_model_len_tokens=256, model=tiny_dense).capability.fingerprint
        assert isinstance(stranger, Conflict) and true not in str(stranger), "what it asks for is not told"
        enough.set()
        steps = await training
        counters = (await operator.status()).counters
    assert counters["messages_refused"] == counters["workers_lost"] == len(LIES)
    assert counters["groups_lost"] == counters["c1_violations"] == 0
    check_promises(steps, window=2, groups=GROUPS)
    for trajectory in (each for step in steps for group in step for each in group.trajectories):
        assert 1 <= trajectory.length_tokens <= MAX_TOKENS
        assert trajectory.response_token_ids.min() >= 0 and trajectory.response_token_ids.max() < VOCABULARY
        assert all(math.isfinite(each) and each <= 0 for each in trajectory.logprobs)
        assert {segment.worker_id for segment in trajectory.worker_history} <= {"w0", *(f"liar{i}" for i in range(99))}


@pytest.fixture
async def shell(tmp_path: Path, tiny_dense: Path) -> AsyncIterator[Shell]:
    made = Shell(tmp_path, tiny_dense, None)
    yield made
    await made.runtime.close()


async def test_tokens_after_an_end_and_tokens_that_were_others_are_refused(shell: Shell) -> None:
    first, second = await shell.admit(2)
    more = TokenDelta(first, 0, 2, (5,), (-0.5,))
    with refused(InvalidValue, field="rows", value=0):
        shell.report(ended(first), more)
    assert not len(shell.runtime.buffer[first])
    shell.report(TokenDelta(second, 0, 0, (3, 4), (-0.5, -0.5)))
    with refused(ReportError, field="g1.0: tokens from 0 on"):
        shell.report(TokenDelta(second, 0, 0, (3, 9, 7), (-0.5, -0.5, -0.5)))
    shell.report(TokenDelta(second, 0, 1, (4, 7), (-0.5, -0.5)))
    assert shell.runtime.buffer[second].tokens.tolist() == [3, 4, 7]


async def test_a_report_that_mixes_versions_ends_nothing(shell: Shell) -> None:
    """The core hears of the violation; the book takes nothing of the report, else the two would not agree."""
    first, second = await shell.admit(2)
    shell.runtime.buffer._columns.version[shell.row(first)] = 3  # as if it had been admitted under another version
    shell.report(ended(second), ended(first))
    assert not len(shell.runtime.buffer[second]) and not shell.runtime.core.failed.done()


async def test_a_worker_cannot_answer_for_another(shell: Shell, tiny_dense: Path) -> None:
    """Else it could set the canary that all others are held to."""
    (command,) = [pending for pending in shell.state.pending.values() if pending.command.worker_id == "w0"]
    other = shell.runtime.sessions.open("w1", 1, "host", shell.session.capability)
    canary = pb.Canary(
        token_ids=convert._bytes((1, 2), convert._INT32), logprobs=convert._bytes((-1.0,), convert._FLOAT32)
    )
    number = command.command.command_id
    shell.runtime.reports.outcome(other, pb.WorkerOutcome(command_id=number, ok=True, canary=canary))
    assert shell.store.canary(0) is None and number in shell.state.pending


async def test_generated_messages_of_a_worker_end_nothing(shell: Shell) -> None:
    """Each is taken over or refused with a reason. What is taken over is what an engine could have sampled."""
    chance = random.Random(11)
    config = shell.runtime.config
    requests = await shell.admit(4, group_size=2)
    rows = [shell.row(request_id).to_bytes(4, "little") for request_id in (*requests, "nobody")]
    taken = 0
    for _ in range(20_000):
        known = {
            "version": (0, 0, 0, 1),
            "rows": (*rows, rows[0] + rows[1]),
            "first_tokens": (bytes(4), bytes(4), b"\1\0\0\0", b"\2\0\0\0", bytes(8)),
            "counts": (b"\1\0\0\0", b"\1\0\0\0", b"\2\0\0\0", b"\1\0\0\0" * 2),
            "token_ids": (b"\3\0\0\0", b"\3\0\0\0", bytes(8)),
            "logprobs": (b"\0\0\x80\xbf", b"\0\0\x80\xbf", b"\0\0\x80\xbf" * 2),
            "ends": (b"", b"", b"", b"\0", b"\2", b"\0\2"),
            "kv_used_tokens": (0, 64),
            "generated_tokens": (0, 5),
            "reprefilled_tokens": (0, 5),
            "command_id": range(1, 40),
            "error_kind": ("", "refused", "invalid", "weights"),
            "locator": ("", f"1-{'0' * 32}.kv"),
        }
        message = hostile(pb.WorkerMessage, chance, known)
        try:
            if message.HasField("hello"):
                checked_hello(message.hello, config, VOCABULARY)
            elif message.HasField("report"):
                shell.runtime.reports.report(shell.session, message.report)
            else:
                shell.runtime.reports.outcome(shell.session, message.outcome)
            taken += 1
        except InvalidValue as refused:
            str(refused).encode()  # it has to travel
        assert not shell.runtime.core.failed.done(), message
    assert 1000 < taken < 19_000
    for _, entries in shell.runtime.buffer.groups():
        for entry in entries:
            assert len(entry.tokens) == len(entry.logprobs) <= MAX_TOKENS + 16
            assert all(0 <= token_id < VOCABULARY for token_id in entry.tokens)
            assert all(math.isfinite(each) and each <= 0 for each in entry.logprobs)
