"""An evaluation at the client: yields the groups of one version as they finish, then their scores."""

from collections import deque
from typing import Any, Self

from dora.client.connection import Connection
from dora.data.trajectory import TrajectoryGroup
from dora.rpc import dora_pb2 as pb
from dora.rpc.channel import check_message_bytes
from dora.rpc.convert import group_from_wire
from dora.rpc.dora_pb2_grpc import PromptsStub
from dora.rpc.errors import ServiceUnavailable


class Evaluation:
    """An evaluation: an asynchronous iterator that yields each group once, as it finishes.

    ``evaluation_id`` and ``version`` are known after the first group or :meth:`begun`, ``reason`` at the end. Cancel an
    evaluation that you leave early. It ends with its connection: ServiceUnavailable is raised then, and the groups
    received so far are in ``groups``.
    """

    def __init__(self, connection: Connection, request: pb.EvaluateRequest) -> None:
        """Sends the request; awaiting raises its errors. Raises LimitExceeded for a message over the limit at once."""
        check_message_bytes("EvaluateRequest", request, connection.max_message_bytes)
        self.requested = len(request.prompts)
        self.evaluation_id = ""
        self.version = -1
        self.groups: list[TrajectoryGroup] = []  # groups already yielded
        self.refused: dict[str, str] = {}  # prompt id -> reason of the refusal
        self.reason = ""  # reason of an early end; empty if there was none
        self.ended = False
        self._connection = connection
        self._replies: Any = connection.stub(PromptsStub).Evaluate(request)
        self._parts: list[pb.TrajectoryGroup] = []  # of a group whose other parts are still to come
        self._come: deque[TrajectoryGroup] = deque()

    @property
    def missing(self) -> int:
        return self.requested - len(self.groups) - len(self.refused)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TrajectoryGroup:
        """Raises InvalidValue, Conflict, NotFound or LimitExceeded if the service refuses the evaluation."""
        while not self._come and not self.ended:
            await self._receive()
        if not self._come:
            raise StopAsyncIteration
        group = self._come.popleft()
        self.groups.append(group)
        return group

    async def begun(self) -> Self:
        """Waits until the service has accepted the evaluation. Raises as iteration does."""
        while not self.evaluation_id:
            await self._receive()
        return self

    async def whole(self) -> Self:
        """Waits for the end."""
        async for _ in self:
            pass
        return self

    def cancel(self) -> None:
        """Cancels the evaluation. May be repeated, and called after its end."""
        self._replies.cancel()

    async def _receive(self) -> None:
        part: pb.EvaluationPart | None = await self._connection.read(self._replies)
        if part is None:
            raise ServiceUnavailable(f"evaluation {self.evaluation_id} was interrupted: connection lost")
        if part.evaluation_id:
            self.evaluation_id, self.version = part.evaluation_id, part.version
        self.refused.update((refused.prompt_id, refused.reason) for refused in part.refused)
        for message in part.groups:
            self._parts.append(message)
            if not message.continues:
                parts, self._parts = self._parts, []
                self._come.append(group_from_wire(*parts))
        if part.HasField("end"):
            self.reason, self.ended = part.end.reason, True
