"""The gRPC services for prompts and operators."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from dora.core import events as on
from dora.errors import MISSING, Conflict, InvalidValue, one_of
from dora.orchestrator.recovery import named
from dora.orchestrator.runtime import Runtime
from dora.orchestrator.services import shown, status
from dora.orchestrator.services.cancel import cancelled
from dora.orchestrator.services.evaluation import evaluating
from dora.rpc import dora_pb2 as pb
from dora.rpc import dora_pb2_grpc as stubs
from dora.rpc.errors import ServicerContext, ServiceUnavailable
from dora.rpc.interceptor import Counter

WATCH_PERIOD_MIN_MS = 50
TRACE = ("traceparent", "tracestate")  # of a call's metadata: the caller's span
WATCHES_MAX = 32  # open at once
NO_STATE = "This service has no state folder, so there is nothing to checkpoint. Start it with `--state DIR`."


class PromptService(stubs.PromptsServicer):
    """Queues prompts: all of a call or none."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._reading = asyncio.Lock()  # for one batch at a time: decoded, it may take ten times its message's memory

    async def Submit(self, request: pb.SubmitRequest, context: ServicerContext) -> pb.SubmitReply:
        feed = self._runtime.feed
        feed.check_room(len(request.prompts))
        async with self._reading:
            # In a thread, because texts are tokenised. The queue may be full afterwards.
            prompts = await asyncio.to_thread(lambda: [feed.check.from_wire(prompt) for prompt in request.prompts])
            free = feed.queue(prompts)
            if self._runtime.traces is not None:
                trace = {str(key): str(value) for key, value in context.invocation_metadata() or () if key in TRACE}
                self._runtime.traces.submitted([prompt.prompt_id for prompt in prompts], trace)
        await self._runtime.journal.settled()
        return pb.SubmitReply(accepted=len(prompts), queue_free=free)

    async def End(self, request: pb.EndRequest, context: ServicerContext) -> pb.EndReply:
        left = self._runtime.feed.end()
        await self._runtime.journal.settled()
        return pb.EndReply(prompts_left=left)

    async def Cancel(self, request: pb.CancelRequest, context: ServicerContext) -> pb.CancelReply:
        outcomes = cancelled(self._runtime, request.ids, request.reason)
        await self._runtime.journal.settled()
        return pb.CancelReply(outcomes=outcomes)

    def Evaluate(self, request: pb.EvaluateRequest, context: ServicerContext) -> AsyncIterator[pb.EvaluationPart]:
        return evaluating(self._runtime, request, self._reading, context)


class OperatorService(stubs.OperatorServicer):
    """Shows the service's state, and passes operators' requests to the core."""

    def __init__(self, runtime: Runtime, model: Path) -> None:
        self._runtime = runtime
        self._model = str(model)
        self._watches = Counter("watches", WATCHES_MAX)

    async def GetStatus(self, request: pb.StatusRequest, context: ServicerContext) -> pb.Status:
        return status.of_service(self._runtime, self._model)

    async def WatchStatus(self, request: pb.WatchRequest, context: ServicerContext) -> AsyncIterator[pb.Status]:
        if request.period_ms < WATCH_PERIOD_MIN_MS:
            raise InvalidValue("period_ms", request.period_ms, f"at least {WATCH_PERIOD_MIN_MS}")
        with self._watches.one():
            news = status.News(self._runtime.telemetry) if request.only_new else None
            while True:
                yield status.of_service(self._runtime, self._model, news)
                await asyncio.sleep(request.period_ms / 1000)

    async def ListTrajectories(self, request: pb.TrajectoriesRequest, context: ServicerContext) -> pb.TrajectoriesReply:
        if request.state and request.state not in shown.STATES:
            raise InvalidValue("state", request.state, one_of(request.state, shown.STATES))
        return shown.trajectories(self._runtime, request)

    async def ShowTrajectory(self, request: pb.ShowTrajectoryRequest, context: ServicerContext) -> pb.ShownTrajectory:
        return shown.trajectory(self._runtime, request)

    async def Migrate(self, request: pb.MigrateRequest, context: ServicerContext) -> pb.OperatorReply:
        self._runtime.post(on.MigrateAsked(request.trajectory_id, request.target_worker))
        return pb.OperatorReply(message=f"{request.trajectory_id} moves to {request.target_worker}", moves=1)

    async def Drain(self, request: pb.DrainRequest, context: ServicerContext) -> pb.OperatorReply:
        name, hosts = request.worker_id, self._runtime.hosts
        if hosts.has(name) and name not in self._runtime.machine.state.workers:
            with self._changing() as reply:
                count = hosts.worker_counts.drain(name)
                reply.message = f"{name} is draining: its workers ({count}) leave, then the host"
            return reply
        with self._changing() as reply:
            hosts.worker_counts.drain_worker(name)
            reply.message = f"{name} is draining and will leave"
        return reply

    async def Scale(self, request: pb.ScaleRequest, context: ServicerContext) -> pb.OperatorReply:
        with self._changing() as reply:
            started, emptied = self._runtime.hosts.worker_counts.scale(request.workers, request.host)
            words = [f"started: {', '.join(started)}"] if started else []
            words += [f"draining: {', '.join(emptied)}"] if emptied else []
            reply.message = "; ".join(words) or "no change: there are so many already"
        return reply

    async def Rebalance(self, request: pb.RebalanceRequest, context: ServicerContext) -> pb.OperatorReply:
        with self._changing() as reply:
            self._runtime.post(on.RebalanceAsked())
            reply.message = "a re-balancing cycle was run"
        return reply

    async def Checkpoint(self, request: pb.CheckpointRequest, context: ServicerContext) -> pb.CheckpointReply:
        runtime = self._runtime
        if runtime.journal.log is None:
            raise Conflict("checkpoint", MISSING, "of a service started with --state DIR", said=NO_STATE)
        kept, version = await self._kept(request.name) if request.name else ("", 0)
        size, state = await runtime.journal.log.checkpoint(), runtime.machine.state
        return pb.CheckpointReply(
            folder=runtime.config.service.state,
            incarnation=runtime.incarnation,
            step=state.window.newest,
            groups=len(state.group_row),
            groups_leased=len(state.leased),
            prompts_queued=len(runtime.feed),
            log_bytes=size.log_bytes,
            live_bytes=size.live_bytes,
            segments=size.segments,
            kept=kept,
            kept_version=version,
        )

    async def _kept(self, name: str) -> tuple[str, int]:
        """Keeps the newest version under a name. Returns the folder and the version.

        Raises InvalidValue, and ServiceUnavailable if it cannot be written.
        """
        runtime, newest = self._runtime, self._runtime.machine.state.window.newest
        folder = Path(runtime.config.service.state)
        named.check_name(folder, name)
        facts = {"version": newest, "kept_at": time.time()}
        try:
            source = named.source_of(folder, runtime.store.folder(newest), newest)
            return str(await asyncio.to_thread(named.keep, folder, name, source, facts)), newest
        except OSError as error:
            raise ServiceUnavailable(f"the checkpoint cannot be written ({error.strerror}); repeat it") from error

    async def Examine(self, request: pb.ExamineRequest, context: ServicerContext) -> AsyncIterator[pb.ExaminedHost]:
        async with contextlib.aclosing(self._runtime.examinations.run(probe=request.probe)) as found:
            async for each in found:
                yield each

    @contextlib.contextmanager
    def _changing(self) -> Iterator[pb.OperatorReply]:
        """Yields a reply that counts the moves and loads which begin meanwhile."""
        state, reply = self._runtime.machine.state, pb.OperatorReply()
        moves, loads = len(state.handoffs), sum(worker.loading >= 0 for worker in state.workers.values())
        yield reply
        reply.moves = max(0, len(state.handoffs) - moves)
        reply.loads = max(0, sum(worker.loading >= 0 for worker in state.workers.values()) - loads)
