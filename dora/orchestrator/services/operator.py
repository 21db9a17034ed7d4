"""The services of those who submit prompts and of operators."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from dora.errors import InvalidValue, one_of
from dora.orchestrator.core import events as on
from dora.orchestrator.runtime import Runtime
from dora.orchestrator.services import status
from dora.orchestrator.services.cancel import cancelled
from dora.rpc import dora_pb2 as pb
from dora.rpc import dora_pb2_grpc as stubs
from dora.rpc.door import Counter
from dora.rpc.errors import ServicerContext

WATCH_PERIOD_MIN_MS = 50
WATCHES_MOST = 32  # open at once


class PromptService(stubs.PromptsServicer):
    """Takes prompts in, all of a call or none."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._reading = asyncio.Lock()  # of one batch at a time: decoded, it may take ten times its message's memory

    async def Submit(self, request: pb.SubmitRequest, context: ServicerContext) -> pb.SubmitReply:
        feed = self._runtime.feed
        feed.check_room(len(request.prompts))
        async with self._reading:
            # In a thread: texts are tokenised. The queue may be full by then.
            prompts = await asyncio.to_thread(lambda: [feed.check.from_wire(prompt) for prompt in request.prompts])
            free = feed.queue(prompts)
        return pb.SubmitReply(accepted=len(prompts), queue_free=free)

    async def End(self, request: pb.EndRequest, context: ServicerContext) -> pb.EndReply:
        return pb.EndReply(prompts_left=self._runtime.feed.end())

    async def Cancel(self, request: pb.CancelRequest, context: ServicerContext) -> pb.CancelReply:
        return pb.CancelReply(outcomes=cancelled(self._runtime, request.ids, request.reason))


class OperatorService(stubs.OperatorServicer):
    """Shows what the service is doing, and hands an operator's wishes to the core."""

    def __init__(self, runtime: Runtime, model: Path) -> None:
        self._runtime = runtime
        self._model = str(model)
        self._watches = Counter("watches", WATCHES_MOST)

    async def GetStatus(self, request: pb.StatusRequest, context: ServicerContext) -> pb.Status:
        return status.of_service(self._runtime, self._model)

    async def WatchStatus(self, request: pb.WatchRequest, context: ServicerContext) -> AsyncIterator[pb.Status]:
        if request.period_ms < WATCH_PERIOD_MIN_MS:
            raise InvalidValue("period_ms", request.period_ms, f"at least {WATCH_PERIOD_MIN_MS}")
        with self._watches.one():
            while True:
                yield status.of_service(self._runtime, self._model)
                await asyncio.sleep(request.period_ms / 1000)

    async def ListTrajectories(self, request: pb.TrajectoriesRequest, context: ServicerContext) -> pb.TrajectoriesReply:
        if request.state and request.state not in status.STATES:
            raise InvalidValue("state", request.state, one_of(request.state, status.STATES))
        return status.trajectories(self._runtime, request.state, request.limit)

    async def Migrate(self, request: pb.MigrateRequest, context: ServicerContext) -> pb.OperatorReply:
        self._runtime.post(on.MigrateAsked(request.trajectory_id, request.target_worker))
        return pb.OperatorReply(message=f"{request.trajectory_id} moves to {request.target_worker}", moves=1)

    async def Drain(self, request: pb.DrainRequest, context: ServicerContext) -> pb.OperatorReply:
        return self._change(on.DrainAsked(request.worker_id), f"{request.worker_id} is being emptied and will leave")

    async def Rebalance(self, request: pb.RebalanceRequest, context: ServicerContext) -> pb.OperatorReply:
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
