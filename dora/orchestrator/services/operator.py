"""The gRPC services for prompts and operators."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from math import inf

from dora.core import events as on
from dora.errors import InvalidValue, NotFound, one_of
from dora.orchestrator.core import ServiceCore
from dora.orchestrator.hosts.examinations import Examinations
from dora.orchestrator.hosts.hosts import Hosts
from dora.orchestrator.rollout.core import Core
from dora.orchestrator.rollout.feed import PromptFeed
from dora.orchestrator.rollout.journal import Journal
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.orchestrator.services import shown
from dora.orchestrator.services.cancel import cancelled
from dora.orchestrator.services.checkpoints import Checkpoints
from dora.orchestrator.services.evaluation import Evaluating
from dora.orchestrator.services.recorded import COMMITTED, RecordedTrajectories
from dora.orchestrator.services.status import ServiceStatus
from dora.rpc import dora_pb2 as pb
from dora.rpc import dora_pb2_grpc as stubs
from dora.rpc.errors import ServicerContext
from dora.rpc.interceptor import Counter

WATCH_PERIOD_MIN_MS = 50
TRACE = ("traceparent", "tracestate")  # of a call's metadata: the caller's span
WATCHES_MAX = 32  # open at once


@dataclass(eq=False, repr=False)
class PromptService(stubs.PromptsServicer):
    """Queues all prompts of a call, or none."""

    _core: ServiceCore
    _feed: PromptFeed
    _buffer: ResponseBuffer
    _journal: Journal
    _evaluating: Evaluating

    def __post_init__(self) -> None:
        self._reading = asyncio.Lock()  # for one batch at a time: decoded, it may take ten times its message's memory

    async def Submit(self, request: pb.SubmitRequest, context: ServicerContext) -> pb.SubmitReply:
        feed = self._feed
        feed.check_room(len(request.prompts))
        async with self._reading:
            # In a thread, because texts are tokenised. The queue may be full afterwards.
            prompts = await asyncio.to_thread(lambda: [feed.check.from_wire(prompt) for prompt in request.prompts])
            free = feed.queue(prompts)
            if self._core.traces is not None:
                trace = {str(key): str(value) for key, value in context.invocation_metadata() or () if key in TRACE}
                self._core.traces.submitted([prompt.prompt_id for prompt in prompts], trace)
        await self._journal.settled()
        return pb.SubmitReply(accepted=len(prompts), queue_free=free)

    async def End(self, request: pb.EndRequest, context: ServicerContext) -> pb.EndReply:
        left = self._feed.end()
        await self._journal.settled()
        return pb.EndReply(prompts_left=left)

    async def Cancel(self, request: pb.CancelRequest, context: ServicerContext) -> pb.CancelReply:
        outcomes = cancelled(self._core, self._feed.ledger, self._buffer, request.ids, request.reason)
        await self._journal.settled()
        return pb.CancelReply(outcomes=outcomes)

    def Evaluate(self, request: pb.EvaluateRequest, context: ServicerContext) -> AsyncIterator[pb.EvaluationPart]:
        return self._evaluating.run(request, self._reading, context)


@dataclass(eq=False, repr=False)
class OperatorService(stubs.OperatorServicer):
    """Shows the service's state, and passes operators' requests to the core."""

    _core: Core
    _buffer: ResponseBuffer
    _hosts: Hosts
    _status: ServiceStatus
    _checkpoints: Checkpoints
    _examinations: Examinations
    _recorded: RecordedTrajectories
    _model: str

    def __post_init__(self) -> None:
        self._watches = Counter("watches", WATCHES_MAX)

    async def GetStatus(self, request: pb.StatusRequest, context: ServicerContext) -> pb.Status:
        return self._status.of_service(self._model)

    async def WatchStatus(self, request: pb.WatchRequest, context: ServicerContext) -> AsyncIterator[pb.Status]:
        if request.period_ms < WATCH_PERIOD_MIN_MS:
            raise InvalidValue("period_ms", request.period_ms, f"at least {WATCH_PERIOD_MIN_MS}")
        with self._watches.one():
            news = self._status.news() if request.only_new else None
            while True:
                yield self._status.of_service(self._model, news)
                await asyncio.sleep(request.period_ms / 1000)

    async def ListTrajectories(self, request: pb.TrajectoriesRequest, context: ServicerContext) -> pb.TrajectoriesReply:
        if request.state == COMMITTED:
            return await self._recorded.list(request)
        if request.state and request.state not in shown.STATES:
            raise InvalidValue("state", request.state, one_of(request.state, (*shown.STATES, COMMITTED)))
        return shown.trajectories(self._core.state, self._buffer, request)

    async def ShowTrajectory(self, request: pb.ShowTrajectoryRequest, context: ServicerContext) -> pb.ShownTrajectory:
        if request.tokens > shown.TOKENS_MAX:
            raise InvalidValue("tokens", request.tokens, f"at most {shown.TOKENS_MAX}")
        try:
            return shown.trajectory(self._core.state, self._buffer, request)
        except NotFound:
            return await self._recorded.show(request)

    async def Migrate(self, request: pb.MigrateRequest, context: ServicerContext) -> pb.OperatorReply:
        self._core.post(on.MigrationRequested(request.trajectory_id, request.target_worker))
        return pb.OperatorReply(message=f"{request.trajectory_id} moves to {request.target_worker}", moves=1)

    async def Drain(self, request: pb.DrainRequest, context: ServicerContext) -> pb.OperatorReply:
        name, hosts, within_s = request.worker_id, self._hosts, request.within_s
        if not 0.0 <= within_s < inf:
            raise InvalidValue("--within", within_s, "0 or more seconds")
        if hosts.has(name) and name not in self._core.state.workers:
            with self._changing() as reply:
                count = hosts.drain(name, "operator", within_s)
                by = f", within {within_s:g} s" if within_s else ""
                reply.message = f"{name} is draining: its workers ({count}) leave, then the host{by}"
            return reply
        if within_s:
            raise InvalidValue("--within", within_s, f"a host: {name} is not one of {', '.join(hosts.connected())}")
        with self._changing() as reply:
            hosts.worker_counts.drain_worker(name)
            reply.message = f"{name} is draining and will leave"
        return reply

    async def Scale(self, request: pb.ScaleRequest, context: ServicerContext) -> pb.OperatorReply:
        with self._changing() as reply:
            started, emptied = self._hosts.worker_counts.scale(request.workers, request.host)
            words = [f"started: {', '.join(started)}"] if started else []
            words += [f"draining: {', '.join(emptied)}"] if emptied else []
            reply.message = "; ".join(words) or "no change: there are so many already"
        return reply

    async def Rebalance(self, request: pb.RebalanceRequest, context: ServicerContext) -> pb.OperatorReply:
        with self._changing() as reply:
            self._core.post(on.RebalanceRequested())
            reply.message = "a re-balancing cycle was run"
        return reply

    async def Checkpoint(self, request: pb.CheckpointRequest, context: ServicerContext) -> pb.CheckpointReply:
        return await self._checkpoints.make(request.name)

    async def Examine(self, request: pb.ExamineRequest, context: ServicerContext) -> AsyncIterator[pb.ExaminedHost]:
        async with contextlib.aclosing(self._examinations.run(probe=request.probe)) as found:
            async for each in found:
                yield each

    @contextlib.contextmanager
    def _changing(self) -> Iterator[pb.OperatorReply]:
        """Yields a reply that counts the moves and loads which begin meanwhile."""
        state, reply = self._core.state, pb.OperatorReply()
        moves, loads = len(state.handoffs), sum(worker.loading >= 0 for worker in state.workers.values())
        yield reply
        reply.moves = max(0, len(state.handoffs) - moves)
        reply.loads = max(0, sum(worker.loading >= 0 for worker in state.workers.values()) - loads)
