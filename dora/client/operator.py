"""The operator's client."""

from collections.abc import AsyncIterator
from pathlib import Path

from dora.client.connection import Client, check_count
from dora.rpc import dora_pb2 as pb
from dora.rpc.dora_pb2_grpc import OperatorStub
from dora.tls import Tls


class Operator(Client):
    """Queries a service and controls it. Replies are the messages of dora.proto.

    Every method raises Unauthenticated, ServiceUnavailable, NotFound and Conflict as the service does.
    """

    def __init__(
        self, address: str, token: str | Path = "", *, timeout_s: float = 30.0, tls: Tls | None = None
    ) -> None:
        super().__init__(address, token, tls=tls)
        self._timeout_s = timeout_s

    async def status(self) -> pb.Status:
        return await self._connection.call(self._stub.GetStatus, pb.StatusRequest(), self._timeout_s)

    async def watch(self, period_ms: int = 500, *, only_new: bool = False) -> AsyncIterator[pb.Status]:
        """Yields the status at most every ``period_ms``, until the service ends the stream or the caller stops.

        With ``only_new``, leaves out steps that were yielded before, and has the moves since then.
        """
        check_count("period_ms", period_ms)
        stream = self._stub.WatchStatus(pb.WatchRequest(period_ms=period_ms, only_new=only_new))
        try:
            while (status := await self._connection.read(stream)) is not None:
                yield status
        finally:
            stream.cancel()

    async def examine(self, *, probe: bool = False) -> AsyncIterator[pb.ExaminedHost]:
        """Examines every host, and yields each result as it comes. With ``probe``, each host also sends KV blocks to
        others and back, and fetches chunks of the newest version. Raises Conflict if another one is under way.
        """
        stream = self._stub.Examine(pb.ExamineRequest(probe=probe))
        try:
            while (found := await self._connection.read(stream)) is not None:
                yield found
        finally:
            stream.cancel()

    async def trajectories(
        self, state: str = "", limit: int = 0, *, offset: int = 0, worker: str = ""
    ) -> pb.TrajectoriesReply:
        """Lists the trajectories in ``state`` and of ``worker`` (empty for all), at most ``limit`` (0 for 100)."""
        check_count("limit", limit)
        check_count("offset", offset)
        request = pb.TrajectoriesRequest(state=state, limit=limit, offset=offset, worker=worker)
        return await self._connection.call(self._stub.ListTrajectories, request, self._timeout_s)

    async def trajectory(self, trajectory_id: str, first_token: int = 0, tokens: int = 0) -> pb.ShownTrajectory:
        """Returns a trajectory, a committed one too if there is a record, with at most ``tokens`` (0 for 4,096)."""
        check_count("first_token", first_token)
        check_count("tokens", tokens)
        request = pb.ShowTrajectoryRequest(trajectory_id=trajectory_id, first_token=first_token, tokens=tokens)
        return await self._connection.call(self._stub.ShowTrajectory, request, self._timeout_s)

    async def migrate(self, trajectory_id: str, target_worker: str) -> pb.OperatorReply:
        request = pb.MigrateRequest(trajectory_id=trajectory_id, target_worker=target_worker)
        return await self._connection.call(self._stub.Migrate, request, self._timeout_s)

    async def drain(self, worker_id: str, within_s: float = 0.0) -> pb.OperatorReply:
        """Takes a worker, or all workers of the host that ``worker_id`` names, out of service.

        ``within_s`` is a host's deadline: what it still holds then is lost with it. 0: it has no deadline.
        """
        request = pb.DrainRequest(worker_id=worker_id, within_s=within_s)
        return await self._connection.call(self._stub.Drain, request, self._timeout_s)

    async def scale(self, workers: int, host: str = "") -> pb.OperatorReply:
        """Sets the number of workers of a host, or in total if ``host`` is empty."""
        check_count("workers", workers)
        request = pb.ScaleRequest(workers=workers, host=host)
        return await self._connection.call(self._stub.Scale, request, self._timeout_s)

    async def rebalance(self) -> pb.OperatorReply:
        return await self._connection.call(self._stub.Rebalance, pb.RebalanceRequest(), self._timeout_s)

    async def checkpoint(self, name: str = "") -> pb.CheckpointReply:
        """Returns once all data generated and acknowledged so far is on disk.

        With a ``name``, also keeps the newest version in the state folder, under this name. Raises Conflict if the
        service has no state folder or the name is taken, InvalidValue for a name that is not allowed.
        """
        return await self._connection.call(self._stub.Checkpoint, pb.CheckpointRequest(name=name), self._timeout_s)

    @property
    def _stub(self) -> OperatorStub:
        return self._connection.stub(OperatorStub)
