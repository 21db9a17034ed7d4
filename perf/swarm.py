"""Synthetic workers, many in one process, each with a connection of its own: the load of perf/orchestrator.py.

Sessions are kept at the end of a turn, as engines keep them. The first token of a later turn is reported at once.
"""

import asyncio
import math
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
import numpy as np

from dora.data.engine_times import HISTOGRAMS
from dora.data.types import EngineCapability
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from dora.rpc.channel import channel_options
from dora.rpc.proven import ProvenChannel, Prover

KEPT_BYTES: Final = 32 << 20  # of reports that are kept, to be sent again to a server that drops them
ENDLESS: Final = 1 << 40
GOLDEN: Final = 0.6180339887  # its multiples are spread evenly over 0 to 1
END_WAITS_S: Final = 0.05  # for others, as in dora/worker/reporting.py; or this part of the period
END_WAITS_SHARE: Final = 0.125
POOL_TOKENS: Final = 1 << 16  # made once, out of which reports are cut
# done: tokens that were reported; end: those at which the response, or its turn, ends
REQUEST: Final = {"row": np.int64, "began_s": np.float64, "done": np.int64, "end": np.int64}
LATE_S: Final = 0.005  # of a report that is as good as in time
CONNECT: Final = "/dora.v1.Worker/Connect"


@dataclass(frozen=True)
class Load:
    """The load of each worker: ``requests`` at once, each of ``length`` tokens (0: without end) at ``tokens_per_s``.

    Of a session, each turn has ``length`` tokens.
    """

    requests: int
    length: int
    tokens_per_s: float


@dataclass
class Sent:
    """The messages that all workers of a swarm have sent."""

    started: int = 0
    tokens: int = 0
    reports: int = 0
    report_bytes: int = 0
    kept: deque[tuple[bytes, int]] = field(default_factory=deque)  # reports, with their tokens
    kept_bytes: int = 0
    keeps: bool = False

    def note(self, content: bytes, tokens: int) -> None:
        self.tokens += tokens
        self.reports += 1
        self.report_bytes += len(content)
        if self.keeps and self.kept_bytes < KEPT_BYTES:
            self.kept.append((content, tokens))
            self.kept_bytes += len(content)


def _times(rng: np.random.Generator) -> pb.EngineTimes:
    counted = [(each.name, rng.integers(0, 100_000, len(each.bounds) + 1)) for each in HISTOGRAMS]
    return pb.EngineTimes(histograms=[pb.Histogram(name=name, buckets=counts.tolist()) for name, counts in counted])


class SyntheticWorker:
    """One worker: obeys commands at once, samples tokens by the clock, reports as the service says."""

    def __init__(self, name: str, load: Load, sent: Sent, rng: np.random.Generator, vocab_size: int) -> None:
        self.name, self._load, self._sent = name, load, sent
        self._random = rng
        self._token_ids = rng.integers(3, vocab_size, POOL_TOKENS, dtype=np.int32)
        self._logprobs = -rng.random(POOL_TOKENS, dtype=np.float32)
        self._rows: dict[str, int] = {}  # of requests, by id
        self._kept: dict[str, int] = {}  # sessions between two turns, with their tokens
        self._session_at: dict[int, str] = {}  # the session that runs in a row
        self._first_s = math.inf  # when the first token of a later turn is due
        self._requests = {name: np.zeros(0, dtype) for name, dtype in REQUEST.items()}
        self._version = -1
        self._generated = 0
        self._begun = 0
        self._answers: list[int] = []  # ids of commands that began a request or a turn
        self._times: pb.EngineTimes | None = _times(rng)  # of the first report
        self.period_s = 1.0
        self.ready = asyncio.Event()
        self.is_asked = asyncio.Event()  # set when a turn has begun

    def obey(self, command: pb.WorkerCommand) -> pb.WorkerMessage | None:
        """The outcome; None where the command has none."""
        kind = command.WhichOneof("kind")
        if kind == "pace":
            self.period_s = command.pace.report_period_ms / 1000
            return None
        if kind == "start_requests":
            for order in command.start_requests.requests:
                self._start(order, order.command_id)
            return None
        if kind == "start_request":
            self._start(command.start_request, command.command_id)
            return None
        if kind == "extend_request":
            self._extend(command.extend_request, command.command_id)
            return None
        outcome = pb.WorkerOutcome(command_id=command.command_id, ok=True, at=time.time())
        if kind == "load_version":
            self._version = command.load_version.version
            self.ready.set()
        elif kind == "remove_request":
            self._remove(command.remove_request.request_id)
        elif kind != "cancel_reservation":
            outcome.ok, outcome.error, outcome.error_kind = False, "a synthetic worker moves nothing", "refused"
        return pb.WorkerMessage(outcome=outcome)

    def _start(self, order: pb.StartRequest, command_id: int) -> None:
        """The first groups are as far as they would be had all been running for long: their ends come evenly."""
        done = len(order.output_token_ids) // convert.TOKEN_ID_BYTES
        length, turn_begin = self._load.length or ENDLESS, order.given[-1] if order.given else 0
        is_first = self._load.length and self._begun < self._load.requests
        group = int(order.request_id.removeprefix("g").partition(".")[0])
        ahead = max(done, int(length * (group * GOLDEN % 1.0))) if is_first else done
        self._enter(order.request_id, order.row, ahead, done, turn_begin + length)
        if order.keeps:
            self._session_at[order.row] = order.request_id
        self._begun += 1
        self._answers.append(command_id)
        self._sent.started += 1

    def _extend(self, order: pb.ExtendRequest, command_id: int) -> None:
        self._answers.append(command_id)
        done = self._kept.pop(order.request_id) + len(order.given_token_ids) // convert.TOKEN_ID_BYTES
        self._enter(order.request_id, order.row, done, done, done + (self._load.length or ENDLESS))
        self._session_at[order.row] = order.request_id
        self._first_s = min(self._first_s, time.monotonic() + 1 / self._load.tokens_per_s)
        self.is_asked.set()

    def _enter(self, request_id: str, row: int, ahead: int, done: int, end: int) -> None:
        """``ahead``: its tokens by now, of which ``done`` were reported."""
        began_s = time.monotonic() - ahead / self._load.tokens_per_s
        new = {"row": row, "began_s": began_s, "done": done, "end": end}
        self._requests = {name: np.append(column, new[name]) for name, column in self._requests.items()}
        self._rows[request_id] = row

    def _remove(self, request_id: str) -> None:
        self._kept.pop(request_id, None)
        row = self._rows.pop(request_id, -1)
        self._session_at.pop(row, None)
        self._keep(self._requests["row"] != row)

    def _keep(self, kept: np.ndarray) -> None:
        self._requests = {name: column[kept] for name, column in self._requests.items()}

    def due_s(self, reported_s: float) -> tuple[float, bool]:
        """When the next report is due, and whether it is of ends only."""
        due_s, requests = min(reported_s + self.period_s, self._first_s), self._requests
        if self._load.length and len(requests["row"]):
            ends_s = float((requests["began_s"] + requests["end"] / self._load.tokens_per_s).min())
            ends_s += max(END_WAITS_S, END_WAITS_SHARE * self.period_s)
            return min(due_s, ends_s), ends_s < due_s
        return due_s, False

    def stall(self, late_s: float) -> None:
        """Nothing was sampled for so long, as the service did not read."""
        self._requests["began_s"] += late_s

    def report(self, ends_only: bool = False) -> tuple[bytes, int]:
        """Returns the tokens since the last report, or the ended ones, and their number."""
        now_s, end, requests = time.monotonic(), self._requests["end"], self._requests
        reached = np.minimum(end, ((now_s - requests["began_s"]) * self._load.tokens_per_s).astype(np.int64))
        some = (reached > requests["done"]) & (not ends_only or reached == end)
        counts, ends = (reached - requests["done"])[some], (reached == end)[some]
        tokens = int(counts.sum())
        at = int(self._random.integers(0, max(1, POOL_TOKENS - tokens)))
        columns = pb.TokenColumns(
            rows=requests["row"][some].astype("<u4").tobytes(),
            first_tokens=requests["done"][some].astype("<u4").tobytes(),
            counts=counts.astype("<u4").tobytes(),
            ends=(2 * ends).astype("u1").tobytes() if ends.any() else b"",
            token_ids=np.resize(self._token_ids[at : at + tokens], tokens).tobytes(),
            logprobs=np.resize(self._logprobs[at : at + tokens], tokens).tobytes(),
        )
        requests["done"][some] = reached[some]
        if not ends_only:
            self._first_s = math.inf if self._first_s <= now_s else self._first_s
        if ends.any():
            for row, done in zip(requests["row"][some][ends].tolist(), reached[some][ends].tolist(), strict=True):
                if (session_id := self._session_at.pop(row, "")) != "":
                    self._kept[session_id] = done
            self._keep(requests["done"] < end)
        self._generated += tokens
        report = pb.WorkerReport(
            tokens=columns if tokens else None,
            running=len(self._requests["row"]),
            kv_used_tokens=int(self._requests["done"].sum()) + sum(self._kept.values()),
            generated_tokens=self._generated,
            version=self._version,
            at=time.time(),
            times=self._times,
            begun=self._answers,
        )
        self._times, self._answers = None, []
        return pb.WorkerMessage(report=report).SerializeToString(), tokens


class Swarm:
    """``run`` connects all workers and serves until it is cancelled; ``ready`` once each hosts a version."""

    def __init__(self, address: str, token: str, capability: EngineCapability, load: Load, workers: int) -> None:
        self._address, self._token, self._capability = address, token, capability
        self.sent = Sent()
        self.workers = [
            SyntheticWorker(f"s{index}", load, self.sent, np.random.default_rng(index), capability.vocab_size)
            for index in range(workers)
        ]

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for worker in self.workers:
                group.create_task(self._serve(worker))

    async def ready(self) -> None:
        for worker in self.workers:
            await worker.ready.wait()

    async def _serve(self, worker: SyntheticWorker) -> None:
        options = [*channel_options(proxied=False), ("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(self._address, options=options) as channel:
            connect = channel.stream_stream(CONNECT, response_deserializer=pb.WorkerCommand.FromString)
            sent = await ProvenChannel(channel, Prover(self._address, self._token)).credential(CONNECT)
            call: Any = connect(metadata=sent.metadata)
            hello = convert.hello_to_wire(worker.name, 1, "synthetic", self._capability)
            hello.takes_start_requests = True
            await call.write(pb.WorkerMessage(hello=hello).SerializeToString())
            worker.period_s = (await call.read()).welcome.report_period_ms / 1000
            writing = asyncio.Lock()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._obey(worker, call, writing))
                group.create_task(self._report(worker, call, writing))

    async def _obey(self, worker: SyntheticWorker, call: Any, writing: asyncio.Lock) -> None:
        while (command := await call.read()) is not grpc.aio.EOF:
            said = worker.obey(command)
            if said is not None:
                async with writing:
                    await call.write(said.SerializeToString())

    async def _report(self, worker: SyntheticWorker, call: Any, writing: asyncio.Lock) -> None:
        """gRPC holds a writer back whose reader is behind; then nothing is sampled."""
        reported_s = time.monotonic()
        while True:
            (due_s, ends_only), now_s = worker.due_s(reported_s), time.monotonic()
            if due_s > now_s:
                worker.is_asked.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(due_s - now_s):
                        await worker.is_asked.wait()
                continue
            async with writing:
                worker.stall(max(0.0, time.monotonic() - due_s - LATE_S))
                reported_s = reported_s if ends_only else time.monotonic()
                content, tokens = worker.report(ends_only)
                self.sent.note(content, tokens)
                await call.write(content)
