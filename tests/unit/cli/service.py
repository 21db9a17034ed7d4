"""A service that always looks the same, and the command line called against it."""

import socket
from collections.abc import AsyncIterator

import grpc
from typer.testing import CliRunner, Result

from dora.errors import Conflict, InvalidValue, NotFound
from dora.ops.cli.app import app
from dora.rpc import dora_pb2 as pb
from dora.rpc.dora_pb2_grpc import HostServicer, OperatorServicer, PromptsServicer, SessionsServicer
from tests.owner_token import owner_token
from tests.private_token import with_token

TOKEN = owner_token("correct-horse")

STATUS = pb.Status(
    model="tiny",
    uptime_s=62.0,
    window_versions=2,
    groups_per_step=4,
    filling_step=3,
    filling_left=1,
    newest_version=3,
    trainer="grpo",
    versions=[
        pb.VersionStatus(version=2, deadline_step=3, workers=1, groups_open=1, requests_running=4),
        pb.VersionStatus(version=3, deadline_step=4, newest=True, workers=1, groups_finished=2, requests_waiting=1),
    ],
    workers=[
        pb.WorkerStatus(worker_id="w0", epoch=1, state="ready", version=2, target_version=2, running=4, slots=8, pid=7),
        pb.WorkerStatus(worker_id="w1", epoch=4, state="loading", version=2, target_version=3, slots=8, kv_use=0.25),
        pb.WorkerStatus(worker_id="w2", epoch=2, state="lost", version=-1, target_version=-1, reason="silent for 61 s"),
    ],
    counters={"groups_admitted": 15, "groups_trained": 12, "workers_lost": 0, "blackout_ms_p50": 12.25},
    steps=[
        pb.StepMetrics(
            step=2, mean_reward=0.5, staleness_mean=0.25, staleness_max=1, tokens=1234, staleness_groups=(3, 1)
        )
    ],
    prompts_queued=9,
)
RUNNING = pb.TrajectoryStatus(
    trajectory_id="g3.0", group_id="g3", prompt_id="p3", state="running", version=2, worker="w0", tokens=5, max_tokens=9
)
FINISHED = pb.TrajectoryStatus(trajectory_id="g3.1", group_id="g3", prompt_id="p3", state="finished", version=2)


class CannedOperator(OperatorServicer):
    """A service that always looks the same and knows one request and one worker to move it to."""

    async def GetStatus(self, request: pb.StatusRequest, context: grpc.aio.ServicerContext) -> pb.Status:
        return STATUS

    async def WatchStatus(
        self, request: pb.WatchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.Status]:
        """Those of a second."""
        for _ in range(1000 // request.period_ms):
            yield STATUS

    async def ListTrajectories(
        self, request: pb.TrajectoriesRequest, context: grpc.aio.ServicerContext
    ) -> pb.TrajectoriesReply:
        found = [row for row in (RUNNING, FINISHED) if request.state in ("", row.state)]
        return pb.TrajectoriesReply(trajectories=found[: request.limit], total=len(found))

    async def Migrate(self, request: pb.MigrateRequest, context: grpc.aio.ServicerContext) -> pb.OperatorReply:
        if request.trajectory_id != RUNNING.trajectory_id:
            raise NotFound("request", request.trajectory_id, f"one of {RUNNING.trajectory_id}")
        if request.target_worker != "w1":
            raise Conflict("target_worker", request.target_worker, "a worker of version 2")
        return pb.OperatorReply(message="g3.0 moves to w1", moves=1)

    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext) -> pb.OperatorReply:
        by = f" within {request.within_s:g} s" if request.within_s else ""
        return pb.OperatorReply(message=f"{request.worker_id} drains{by}", moves=4)

    async def Scale(self, request: pb.ScaleRequest, context: grpc.aio.ServicerContext) -> pb.OperatorReply:
        place = f" on {request.host}" if request.host else ""
        return pb.OperatorReply(message=f"{request.workers} workers{place}")

    async def Rebalance(self, request: pb.RebalanceRequest, context: grpc.aio.ServicerContext) -> pb.OperatorReply:
        return pb.OperatorReply(message="a re-balancing cycle was run", moves=2, loads=1)

    async def Checkpoint(self, request: pb.CheckpointRequest, context: grpc.aio.ServicerContext) -> pb.CheckpointReply:
        size = {"log_bytes": 3 << 20, "live_bytes": 1 << 20, "segments": 2}
        named = {"kept": f"/out/state/checkpoints/{request.name}", "kept_version": 3} if request.name else {}
        return pb.CheckpointReply(
            folder="/out/state", incarnation=1, step=3, groups=9, groups_leased=4, **size, **named
        )


class CannedHosts(HostServicer):
    """It takes no host, and says how each introduces itself."""

    async def Join(
        self, request_iterator: AsyncIterator[pb.HostMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.HostOrder]:
        hello = (await anext(aiter(request_iterator))).hello
        raise InvalidValue("hello", f"{hello.name} with {hello.workers} workers in {hello.zone}", "another")
        yield pb.HostOrder()


class CannedSessions(SessionsServicer):
    """It describes a model that is on no host."""

    async def Describe(self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext) -> pb.DescribeReply:
        return pb.DescribeReply(model="tiny", newest_version=3, versions=(2, 3))


class CannedPrompts(PromptsServicer):
    """It has one prompt in its queue, one in a group, and one that a step has taken."""

    async def Cancel(self, request: pb.CancelRequest, context: grpc.aio.ServicerContext) -> pb.CancelReply:
        assert request.reason in ("", "mistyped")
        known = {"q1": ("dequeued", ""), "q2": ("cancelled", "g2"), "q3": ("taken", "g3"), "q4": ("before", "")}
        found = [(name, *known.get(name, ("unknown", ""))) for name in request.ids]
        return pb.CancelReply(outcomes=[pb.CancelOutcome(id=i, state=s, group_id=g) for i, s, g in found])


def dora(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def at(address: str, *arguments: str) -> Result:
    return dora(*arguments, "--address", address, "--token-file", with_token(TOKEN))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
