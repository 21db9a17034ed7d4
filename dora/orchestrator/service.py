"""The gRPC services. Each method checks, posts an event, answers; DoraErrors become statuses (rpc/errors.py)."""

import asyncio
import functools
import hashlib
import logging
import math
import re
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import grpc

from dora.errors import Conflict, DoraError, InvalidValue
from dora.orchestrator import views
from dora.orchestrator.book import BookError
from dora.orchestrator.core import events as on
from dora.orchestrator.runtime import Runtime
from dora.orchestrator.sessions import StepStream, WorkerSession
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from dora.rpc import dora_pb2_grpc as stubs
from dora.weights.files import WeightFile

log = logging.getLogger("dora.service")

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

Reply = TypeVar("Reply")

WATCH_PERIOD_MIN_MS = 50
WORKER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class TrainerService(stubs.TrainerServicer):
    """One active trainer, fenced by its epoch."""

    def __init__(self, runtime: Runtime, model: Path) -> None:
        self._runtime = runtime
        self._model = model
        self._epoch = 0
        # A commit stores weights and then posts; an attach in between would strand that version.
        self._changing = asyncio.Lock()
        self._changes: set[asyncio.Task[Any]] = set()  # under way: a task lives while it is held
        self._last_commit: tuple[int, bytes] | None = None

    async def Attach(self, request: pb.AttachRequest, context: Context) -> pb.AttachReply:
        return await self._whole(self._attach(request))

    async def CommitStep(self, request: pb.CommitStepRequest, context: Context) -> pb.CommitStepReply:
        return await self._whole(self._commit(request))

    async def _whole(self, change: Coroutine[Any, Any, Reply]) -> Reply:
        """Goes on where the caller hangs up. A version stored and never committed would bar its step for ever."""
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    async def _attach(self, request: pb.AttachRequest) -> pb.AttachReply:
        runtime = self._runtime
        async with self._changing:
            runtime.post(on.TrainerAttached(self._epoch + 1, request.groups_per_step))
            self._epoch += 1
            if runtime.sessions.stream is not None:
                runtime.sessions.stream.close(superseded=True)
                runtime.sessions.stream = None
            await asyncio.to_thread(runtime.store.discard, self._epoch - 1)
        runtime.trainer_name = request.client_name or "trainer"
        runtime.trainer_seen_s = time.monotonic()
        log.info("trainer %s attached (epoch %d)", runtime.trainer_name, self._epoch)
        window = runtime.machine.state.window
        return pb.AttachReply(
            trainer_epoch=self._epoch,
            next_step=window.newest,
            groups_per_step=window.groups_per_step,
            window_versions=window.size,
            model=str(self._model),
            store_folder=str(runtime.store.root),
            store_proof=str(runtime.store.proof),
            store_proof_bytes=runtime.store.proof_bytes,
            max_message_bytes=runtime.config.service.max_message_bytes,
            reference_version=runtime.config.rollout.reference_version,
            tensors=[
                pb.TensorHeader(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, optional=tensor.optional)
                for tensor in runtime.store.reference.tensors
            ],
        )

    async def StreamStep(self, request: pb.StreamStepRequest, context: Context) -> AsyncIterator[pb.TrajectoryBatch]:
        runtime = self._runtime
        stream = StepStream(request.trainer_epoch, request.step)
        before, runtime.sessions.stream = runtime.sessions.stream, stream
        try:
            runtime.post(on.StepRequested(request.trainer_epoch, request.step))
        except DoraError:
            runtime.sessions.stream = before
            raise
        if before is not None:
            before.close(superseded=True)
        try:
            async for groups in stream.batches():
                for message in convert.trajectory_batches(
                    request.step, groups, max_message_bytes=runtime.config.service.max_message_bytes
                ):
                    yield message
        finally:
            runtime.trainer_seen_s = time.monotonic()
            if runtime.sessions.stream is stream:
                runtime.sessions.stream = None
        if stream.superseded:
            raise Conflict("trainer_epoch", request.trainer_epoch, "the stream that was opened last")
        if stream.exhausted:
            yield pb.TrajectoryBatch(step=request.step, end_of_prompts=True)

    async def UploadWeights(self, request_iterator: AsyncIterator[pb.WeightChunk], context: Context) -> pb.UploadReply:
        first = await anext(aiter(request_iterator), None)
        if first is None or not first.HasField("header"):
            raise InvalidValue("header", None, "in the first message of an upload")
        header, store = first.header, self._runtime.store
        self._check_epoch(header.trainer_epoch)
        opened = functools.partial(
            store.upload, header.trainer_epoch, header.version, header.file_name, header.file_bytes
        )
        with await asyncio.to_thread(opened) as upload:
            await asyncio.to_thread(upload.append, first.content)
            async for chunk in request_iterator:
                await asyncio.to_thread(upload.append, chunk.content)
            return pb.UploadReply(file_bytes=await asyncio.to_thread(upload.finish))

    async def _commit(self, request: pb.CommitStepRequest) -> pb.CommitStepReply:
        runtime = self._runtime
        async with self._changing:
            digest = _commit_digest(request)
            if self._last_commit == (request.step, digest):
                return self._committed()  # the reply was lost, the commit was not
            runtime.machine.check_commit(request.trainer_epoch, request.step)
            if request.version != request.step + 1:
                raise Conflict("version", request.version, f"{request.step + 1}, that is step + 1")
            waited_s = request.waited_s if request.HasField("waited_s") else None
            if waited_s is not None and not 0.0 <= waited_s < math.inf:
                raise InvalidValue("waited_s", waited_s, "a finite number of seconds, 0 or above")
            canary = convert.canary_from_wire(request.canary)
            folder = await asyncio.to_thread(
                functools.partial(
                    runtime.store.publish,
                    request.trainer_epoch,
                    request.version,
                    [WeightFile(file.name, file.file_bytes, file.blake3) for file in request.files],
                    canary,
                )
            )
            runtime.recorder.published(request.version, folder)
            metrics, stepped_s = dict(request.metrics), time.monotonic()
            runtime.telemetry.step(request.step, runtime.book.leased(), metrics, time.time(), stepped_s, waited_s)
            runtime.post(on.StepCommitted(request.trainer_epoch, request.step))
            self._last_commit = (request.step, digest)
        runtime.trainer_seen_s = time.monotonic()
        log.info("step %d is trained; version %d is published", request.step, request.version)
        return self._committed()

    def _committed(self) -> pb.CommitStepReply:
        machine = self._runtime.machine
        return pb.CommitStepReply(
            next_step=machine.state.window.newest, groups_trained=machine.state.counters.groups_trained
        )

    def _check_epoch(self, trainer_epoch: int) -> None:
        if trainer_epoch != self._epoch:
            raise Conflict("trainer_epoch", trainer_epoch, f"{self._epoch}: another trainer has attached since")


def _commit_digest(request: pb.CommitStepRequest) -> bytes:
    """What makes a repeated commit the same: the step, the version and the files' hashes."""
    digest = hashlib.blake2b(f"{request.step}/{request.version}".encode())
    for file in request.files:
        digest.update(file.name.encode() + file.blake3)
    return digest.digest()


class PromptService(stubs.PromptsServicer):
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def Submit(self, request: pb.SubmitRequest, context: Context) -> pb.SubmitReply:
        prompts = [convert.prompt_from_wire(prompt) for prompt in request.prompts]
        free = self._runtime.feed.submit(prompts)
        return pb.SubmitReply(accepted=len(prompts), queue_free=free)


class OperatorService(stubs.OperatorServicer):
    def __init__(self, runtime: Runtime, model: Path) -> None:
        self._runtime = runtime
        self._model = str(model)

    async def GetStatus(self, request: pb.StatusRequest, context: Context) -> pb.Status:
        return views.status(self._runtime, self._model)

    async def WatchStatus(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.Status]:
        if request.period_ms < WATCH_PERIOD_MIN_MS:
            raise InvalidValue("period_ms", request.period_ms, f"at least {WATCH_PERIOD_MIN_MS}")
        while True:
            yield views.status(self._runtime, self._model)
            await asyncio.sleep(request.period_ms / 1000)

    async def ListTrajectories(self, request: pb.TrajectoriesRequest, context: Context) -> pb.TrajectoriesReply:
        if request.state and request.state not in views.STATES:
            raise InvalidValue("state", request.state, ", ".join(views.STATES))
        return views.trajectories(self._runtime, request.state, request.limit)

    async def Migrate(self, request: pb.MigrateRequest, context: Context) -> pb.OperatorReply:
        self._runtime.post(on.MigrateAsked(request.trajectory_id, request.target_worker))
        return pb.OperatorReply(message=f"{request.trajectory_id} moves to {request.target_worker}", moves=1)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.OperatorReply:
        return self._change(on.DrainAsked(request.worker_id), f"{request.worker_id} is being emptied and will leave")

    async def Rebalance(self, request: pb.RebalanceRequest, context: Context) -> pb.OperatorReply:
        return self._change(on.RebalanceAsked(), "a re-balancing cycle was run")

    def _change(self, event: on.Event, message: str) -> pb.OperatorReply:
        state = self._runtime.machine.state
        moves, loads = len(state.handoffs), sum(worker.loading >= 0 for worker in state.workers.values())
        self._runtime.post(event)
        return pb.OperatorReply(
            message=message,
            moves=max(0, len(state.handoffs) - moves),
            loads=max(0, sum(worker.loading >= 0 for worker in state.workers.values()) - loads),
        )


class WorkerService(stubs.WorkerServicer):
    def __init__(self, runtime: Runtime, snapshot_folder: Path) -> None:
        self._runtime = runtime
        self._snapshot_folder = snapshot_folder
        self._fingerprint = ""

    async def Connect(
        self, request_iterator: AsyncIterator[pb.WorkerMessage], context: Context
    ) -> AsyncIterator[pb.WorkerCommand]:
        runtime = self._runtime
        session = self._admit(await anext(aiter(request_iterator), None))
        runtime.sessions.workers[session.worker_id] = session
        reading = asyncio.create_task(self._read(session, request_iterator))
        reading.add_done_callback(lambda _: session.give_up())
        try:
            yield pb.WorkerCommand(
                welcome=pb.Welcome(
                    epoch=session.epoch,
                    snapshot_folder=str(self._snapshot_folder),
                    report_period_ms=runtime.config.workers.report_period_ms,
                )
            )
            capability = session.capability
            runtime.sessions.lost_reasons.pop(session.worker_id, None)
            runtime.post(on.WorkerJoined(session.worker_id, session.epoch, capability.slots, capability.kv_tokens))
            log.info("worker %s joined (epoch %d, pid %d)", session.worker_id, session.epoch, session.pid)
            async for command in session.commands():
                yield command
            if reading.done() and not reading.cancelled() and (error := reading.exception()):
                raise error
        finally:
            reading.cancel()
            runtime.sessions.lose(session, "its connection broke")

    def _admit(self, message: pb.WorkerMessage | None) -> WorkerSession:
        if message is None or not message.HasField("hello"):
            raise InvalidValue("hello", None, "the first message of a worker")
        hello, runtime = message.hello, self._runtime
        capability = convert.capability_from_wire(hello)
        if not WORKER_ID.fullmatch(hello.worker_id):
            raise InvalidValue("worker_id", hello.worker_id, "1 to 64 letters, digits, '.', '_' or '-'")
        if hello.worker_id in runtime.sessions.workers:
            raise Conflict("worker_id", hello.worker_id, "an id that no connected worker has")
        if capability.slots < 1 or capability.kv_tokens < 1:
            raise InvalidValue("slots, kv_tokens", (capability.slots, capability.kv_tokens), "at least 1 each")
        if self._fingerprint not in ("", capability.fingerprint):
            raise Conflict("fingerprint", capability.fingerprint, f"{self._fingerprint}, as the other workers' engines")
        if capability.max_model_len_tokens < runtime.config.workers.max_model_len_tokens:
            limit = runtime.config.workers.max_model_len_tokens
            raise InvalidValue("max_model_len_tokens", capability.max_model_len_tokens, f"at least {limit}")
        self._fingerprint = capability.fingerprint
        return WorkerSession(hello.worker_id, runtime.sessions.new_epoch(), hello.pid, hello.host, capability)

    async def _read(self, session: WorkerSession, messages: AsyncIterator[pb.WorkerMessage]) -> None:
        async for message in messages:
            try:
                if message.HasField("report"):
                    self._runtime.reports.report(session, message.report)
                elif message.HasField("outcome"):
                    self._runtime.reports.outcome(session, message.outcome)
                else:
                    raise InvalidValue("kind", message.WhichOneof("kind"), "report or outcome")
            except (BookError, InvalidValue) as error:
                self._runtime.sessions.replace(session, str(error))
                return
