"""The gRPC service for trainers: attach, stream a step, upload weights, commit. One active trainer, fenced by its
epoch.
"""

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import AsyncIterator, Container, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from dora.config import Config
from dora.core import events as on
from dora.core.rules import learning
from dora.core.rules.lifecycle import check_epoch
from dora.data.mismatch import MOVEMENT, least_kl, mismatches, to_json
from dora.data.run_record import CommittedStep
from dora.errors import MISSING, Conflict, InvalidValue
from dora.journal import records
from dora.journal.durable import Durable
from dora.orchestrator.core import ServiceCore
from dora.orchestrator.hosts.hosts import Hosts
from dora.orchestrator.rollout import distributions as of
from dora.orchestrator.rollout.journal import Journal
from dora.orchestrator.rollout.presence import CLIENT_ID_MAX
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.orchestrator.rollout.streams import StepStream
from dora.orchestrator.rollout.telemetry import Telemetry, staleness_groups
from dora.orchestrator.rollout.trainers import Trainers
from dora.orchestrator.services.draining import Draining
from dora.orchestrator.services.publishing import Publishing
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from dora.rpc import dora_pb2_grpc as stubs
from dora.rpc.errors import ServicerContext
from dora.rpc.packed import packed_batches
from dora.system.awake import awake_s
from dora.system.log_lines import about
from dora.weights.store import WeightStore

log = logging.getLogger("dora.service")

UPLOAD_SILENCE_S: Final = 60.0  # an upload that is silent for so long is given up
METRICS_MAX: Final = 128  # of one commit
METRIC_NAME_MAX: Final = 128  # characters
GROUP_ID_MAX: Final = 128  # characters
REPLAYED: Final = "groups_replayed"  # the metric that counts a commit's replayed groups
CLIENT_NAME_MAX: Final = 128  # characters
# The metrics of a commit that the adaptive window uses, with the largest value of each.
WINDOW_METRICS: Final = {"clip_fraction": 1.0, "effective_sample": 1.0, MOVEMENT: math.inf}

Reply = TypeVar("Reply")


@dataclass(eq=False, repr=False)
class TrainerService(stubs.TrainerServicer):
    """Serves one active trainer, fenced by its epoch."""

    _config: Config
    _core: ServiceCore
    _trainers: Trainers
    _buffer: ResponseBuffer
    _journal: Journal
    _telemetry: Telemetry
    _hosts: Hosts
    _store: WeightStore
    _publishing: Publishing
    _draining: Draining
    _model: Path
    _resumed: Durable  # of the earlier incarnation

    def __post_init__(self) -> None:
        self._epoch = self._resumed.trainer_epoch
        # A commit stores weights and then posts; an attach in between would strand that version.
        self._changing = asyncio.Lock()
        self._changes: set[asyncio.Task[Any]] = set()  # running changes: the event loop keeps no reference to a task
        self._last_commit: tuple[int, bytes] | None = None
        self._last_republish: tuple[int, bytes] | None = None
        if (resumed := self._resumed).incarnation >= 0:
            self._last_commit = resumed.commit_step, resumed.commit_digest
            self._last_republish = resumed.republished, resumed.republished_digest

    async def Attach(self, request: pb.AttachRequest, context: ServicerContext) -> pb.AttachReply:
        return await self._whole(self._attach(request))

    async def CommitStep(self, request: pb.CommitStepRequest, context: ServicerContext) -> pb.CommitStepReply:
        return await self._whole(self._commit(request))

    async def RepublishVersion(
        self, request: pb.RepublishVersionRequest, context: ServicerContext
    ) -> pb.RepublishVersionReply:
        return await self._whole(self._republish(request))

    async def _whole(self, change: Coroutine[Any, Any, Reply]) -> Reply:
        """Completes a change even if its caller disconnects: a stored but uncommitted version would block its step."""
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    async def _attach(self, request: pb.AttachRequest) -> pb.AttachReply:
        presence, store = self._trainers.presence, self._store
        name = request.client_name
        _check_client(request)
        self._config.check_groups_per_step(request.groups_per_step, "groups_per_step")
        async with self._changing:
            lapsed = self._core.state.lease.lapsed
            if not request.take_over:
                presence.check_attach(request.client_id, lapsed)
            self._core.post(on.TrainerAttached(self._epoch + 1, request.groups_per_step))
            self._epoch += 1
            self._trainers.replace_stream(None)
            await self._publishing.discard(self._epoch - 1)
        await self._journal.settled()
        presence.attached(name or "trainer", request.client_id, lapsed)
        log.info("trainer %s attached (epoch %d)", presence.name, self._epoch)
        window = self._core.state.window
        return pb.AttachReply(
            trainer_epoch=self._epoch,
            next_step=window.newest,
            groups_per_step=window.groups_per_step,
            window_versions=max(self._config.window.most, self._buffer.widest_window),
            model=str(self._model),
            store_folder=str(store.root),
            store_proof=str(store.proof),
            store_proof_bytes=store.proof_bytes,
            max_message_bytes=self._config.service.max_message_bytes,
            reference_version=self._config.rollout.reference_version,
            takes_images=self._config.workers.weights_from == "trainer",
            tensors=[
                pb.TensorHeader(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, optional=tensor.optional)
                for tensor in store.reference.tensors
            ],
        )

    async def KeepAlive(
        self, request: pb.KeepAliveRequest, context: ServicerContext
    ) -> AsyncIterator[pb.KeepAliveReply]:
        self._check_epoch(request.trainer_epoch)
        _check_client(request)
        self._trainers.presence.known(request.client_name, request.client_id)
        with self._trainers.presence.staying() as superseded:
            yield pb.KeepAliveReply()
            await superseded.wait()

    async def StreamStep(
        self, request: pb.StreamStepRequest, context: ServicerContext
    ) -> AsyncIterator[pb.TrajectoryBatch | bytes]:
        """Yields serialised messages: packed groups are sent as they were joined."""
        self._check_epoch(request.trainer_epoch)
        stream = StepStream(request.trainer_epoch, request.step)
        requested = on.StepRequested(request.trainer_epoch, request.step)
        self._core.post(requested, lambda: self._trainers.replace_stream(stream))
        batches = packed_batches if request.packed else convert.trajectory_batches
        limit_bytes = self._config.service.max_message_bytes
        try:
            async for groups in stream.batches():
                await self._journal.settled()
                for message in batches(request.step, groups, max_message_bytes=limit_bytes):
                    yield message
        finally:
            self._trainers.presence.seen()
            if self._trainers.stream is stream:
                self._trainers.stream = None
        if stream.error is not None:
            raise stream.error
        if stream.superseded:
            raise Conflict("step", request.step, "read from the latest stream", why="is streamed by a later call")
        if stream.exhausted:
            yield pb.TrajectoryBatch(step=request.step, end_of_prompts=True, ended=self._draining.ended_line())

    async def UploadWeights(
        self, request_iterator: AsyncIterator[pb.WeightChunk], context: ServicerContext
    ) -> pb.UploadReply:
        chunks = aiter(request_iterator)
        first = await self._next_chunk(chunks)
        if first is None or not first.HasField("header"):
            raise InvalidValue("header", MISSING, "in the first message of an upload")
        header = first.header
        self._check_upload(header.trainer_epoch, header.version)
        self._telemetry.step_times.uploads(awake_s())
        async with self._publishing.upload(header) as upload:
            chunk: pb.WeightChunk | None = first
            while chunk is not None:
                await asyncio.to_thread(upload.append, chunk.content)
                chunk = await self._next_chunk(chunks)
                self._check_upload(header.trainer_epoch, header.version)
            return pb.UploadReply(file_bytes=await asyncio.to_thread(upload.finish))

    async def _next_chunk(self, chunks: AsyncIterator[pb.WeightChunk]) -> pb.WeightChunk | None:
        """Returns None at the end. Raises InvalidValue if the trainer is silent."""
        try:
            async with asyncio.timeout(UPLOAD_SILENCE_S):
                return await anext(chunks, None)
        except TimeoutError as error:
            raise InvalidValue("upload", f"silent for {UPLOAD_SILENCE_S:g} s", "sent without such a pause") from error

    def _check_upload(self, trainer_epoch: int, version: int) -> None:
        """Permits only the version that the open step commits, a rejected one, and the last republished one. The
        trainer repeats a republication whose reply is lost.
        """
        self._check_epoch(trainer_epoch)
        state, anew = self._core.state, self._last_republish
        expected = state.window.newest + 1
        if version not in (expected, *state.to_republish, *(anew[:1] if anew is not None else ())):
            raise Conflict("version", version, f"{expected}, which the open step's commit publishes", why="is not next")

    async def _commit(self, request: pb.CommitStepRequest) -> pb.CommitStepReply:
        machine = self._core.machine
        async with self._changing:
            digest, began_s = _commit_digest(request), awake_s()
            if self._last_commit == (request.step, digest):
                return await self._committed()  # the commit succeeded and its reply was lost
            self._check_epoch(request.trainer_epoch)
            machine.check_commit(request.trainer_epoch, request.step)
            if request.version != request.step + 1:
                raise Conflict("version", request.version, f"{request.step + 1}, that is step + 1", why="is not next")
            metrics = checked_metrics(request.metrics)
            waited_s = request.waited_s if request.HasField("waited_s") else None
            if waited_s is not None and not 0.0 <= waited_s < math.inf:
                raise InvalidValue("waited_s", waited_s, "a finite number of seconds, 0 or above")
            folder = await self._publishing.store(request, anew=False)
            leased = self._buffer.leased()
            groups = {group.group_id: len(group) for group in leased}
            ages = staleness_groups(leased)
            replayed = checked_replays(request.replayed_groups, groups, machine.state.window.groups_per_step)
            metrics |= {REPLAYED: float(len(replayed))} if replayed else {}
            told = to_json(mismatches(request.step, metrics))
            step = CommittedStep(
                request.step, request.version, groups, time.time(), ages, waited_s,
                replayed=replayed, drafts=self._telemetry.drafts_of_step(), mismatches=told,
            )  # fmt: skip
            await self._publishing.record(request, folder, digest, step)
            try:
                machine.check_commit(request.trainer_epoch, request.step)
            except Conflict:  # a version was rejected meanwhile: the next commit may bring others
                await self._publishing.withdraw(request.version)
                raise
            stepped_s = awake_s()
            taken, at = self._buffer.leased(), time.time()
            self._telemetry.step(request.step, taken, metrics, at, stepped_s, waited_s, began_s)
            movements = {each.step: each.metrics.get(MOVEMENT, math.inf) for each in self._telemetry.steps}
            signals = (_known(metrics, name) for name in WINDOW_METRICS)
            measured = (
                *(-1.0 if waited_s is None else waited_s, *signals),
                least_kl(request.step, metrics, movements),
            )
            committed = on.StepCommitted(request.trainer_epoch, request.step, *measured)
            self._hosts.published(request.version)
            if self._core.traces is not None:
                self._core.traces.published(request.step, request.version, awake_s() - began_s)
            self._core.post(committed, lambda: self._committed_record(step, digest))
            self._last_commit = (request.step, digest)
            self._trainers.published(request.version)
        self._trainers.presence.seen()
        reply = await self._committed()
        self._telemetry.step_times.answered(awake_s())
        self._telemetry.observe(of.PUBLISH, awake_s() - began_s)
        done = about(step=request.step, version=request.version)
        log.info("step %d is trained; version %d is published", request.step, request.version, extra=done)
        return reply

    def _committed_record(self, step: CommittedStep, digest: bytes) -> records.Committed:
        """Returns the record with the step's time in the run record, because a start compares them."""
        machine = self._core.machine
        return records.Committed(
            step.step, digest, step.committed_at, asdict(machine.counters), learning.snapshot(machine.state)
        )

    async def _republish(self, request: pb.RepublishVersionRequest) -> pb.RepublishVersionReply:
        version = request.version
        async with self._changing:
            digest = _republish_digest(request)
            if version in self._core.state.rejected or self._last_republish != (version, digest):
                await self._publish_anew(request, digest)
        await self._journal.settled()
        self._trainers.presence.seen()
        return pb.RepublishVersionReply(next_step=self._core.state.window.newest)

    async def _publish_anew(self, request: pb.RepublishVersionRequest, digest: bytes) -> None:
        """Raises Conflict unless the version was requested. A version that was found meanwhile stays as it is."""
        machine, version = self._core.machine, request.version
        self._check_epoch(request.trainer_epoch)
        if machine.was_found(version):
            log.info("version %d has been found: the republished weights are not needed", version)
            return
        machine.check_republish(request.trainer_epoch, version)
        with self._hosts.publishing(version):
            folder = await self._publishing.store(request, anew=True)
            await self._publishing.record(request, folder, digest)
            if not machine.has_to_come(version):  # it has left the window: its last groups were cancelled
                await self._publishing.release(version)
                return
            self._hosts.published(version, anew=True)  # first, because workers need its name
            republished = on.VersionRepublished(request.trainer_epoch, version)
            self._core.post(republished, lambda: records.Republished(version, digest))
        self._last_republish = (version, digest)
        log.info("version %d is published again", version, extra=about(version=version))

    async def _committed(self) -> pb.CommitStepReply:
        await self._journal.settled()
        state = self._core.state
        return pb.CommitStepReply(next_step=state.window.newest, groups_trained=state.counters.groups_trained)

    def _check_epoch(self, trainer_epoch: int) -> None:
        if not self._epoch:  # the first epoch is 1
            raise Conflict("trainer_epoch", trainer_epoch, "that of an Attach", why="is early: no trainer has attached")
        try:
            check_epoch(trainer_epoch, self._epoch)
        except Conflict as error:
            why = self._trainers.presence.taken_over()
            raise Conflict("trainer_epoch", trainer_epoch, str(self._epoch), why=why) from error
        self._trainers.presence.known()


def _check_client(request: pb.AttachRequest | pb.KeepAliveRequest) -> None:
    name = request.client_name
    if not name.isprintable() or len(name) > CLIENT_NAME_MAX:
        raise InvalidValue("client_name", name, f"printable, of at most {CLIENT_NAME_MAX} characters")
    if len(request.client_id) > CLIENT_ID_MAX:
        raise InvalidValue("client_id", f"{len(request.client_id)} bytes", f"at most {CLIENT_ID_MAX} bytes")


def checked_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns a commit's metrics for operators. Raises InvalidValue for more than a status can carry."""
    if len(metrics) > METRICS_MAX:
        raise InvalidValue("metrics", f"{len(metrics)} metrics", f"at most {METRICS_MAX}")
    for name in metrics:
        if not (name.isprintable() and 0 < len(name) <= METRIC_NAME_MAX):
            allowed = f"a printable name of 1 to {METRIC_NAME_MAX} characters"
            raise InvalidValue("metrics: name", name, allowed)
    return dict(metrics)


def checked_replays(group_ids: Sequence[str], fresh: Container[str], most: int) -> tuple[str, ...]:
    """Returns the replayed groups that a commit names. Raises InvalidValue for more than ``most``, a repeated id, one
    that no group can have, and one in ``fresh``, the step's own groups.
    """
    if len(group_ids) > most:
        raise InvalidValue("replayed_groups", f"{len(group_ids)} groups", f"at most {most}, the groups of a step")
    named: set[str] = set()
    for group_id in group_ids:
        if group_id in fresh or group_id in named:
            raise InvalidValue("replayed_groups", group_id, "groups of earlier steps, each once")
        if not (group_id.isprintable() and 0 < len(group_id) <= GROUP_ID_MAX):
            allowed = f"a printable id of 1 to {GROUP_ID_MAX} characters"
            raise InvalidValue("replayed_groups", group_id, allowed)
        named.add(group_id)
    return tuple(group_ids)


def _known(metrics: Mapping[str, float], name: str) -> float:
    value = metrics.get(name, -1.0)
    return value if 0.0 <= value <= WINDOW_METRICS[name] else -1.0


def _commit_digest(request: pb.CommitStepRequest) -> bytes:
    return _digest(f"{request.step}/{request.version}", request)


def _republish_digest(request: pb.RepublishVersionRequest) -> bytes:
    return _digest(f"{request.version}/{request.canary.token_ids.hex()}/{request.canary.logprobs.hex()}", request)


def _digest(head: str, request: pb.CommitStepRequest | pb.RepublishVersionRequest) -> bytes:
    digest = hashlib.blake2b(head.encode())
    for file in request.files:
        digest.update(file.name.encode() + file.blake3)
    return digest.digest()
