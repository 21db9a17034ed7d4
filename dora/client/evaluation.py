"""An evaluation at the client: yields the groups of one version as they finish, then their scores."""

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Self

import numpy as np

from dora.client.connection import Connection
from dora.data.trajectory import Trajectory, TrajectoryGroup
from dora.rpc import dora_pb2 as pb
from dora.rpc.channel import check_message_bytes
from dora.rpc.convert import group_from_wire
from dora.rpc.dora_pb2_grpc import PromptsStub
from dora.rpc.errors import ServiceUnavailable


@dataclass(frozen=True, slots=True)
class Score:
    """Statistics of responses. NaN means that no response gives the value."""

    groups: Annotated[int, "prompts whose responses are complete"]
    responses: Annotated[int, "their responses"]
    reward_mean: Annotated[float, "mean reward, over valid verdicts"]
    reward_error: Annotated[float, "standard error of that mean, with each prompt's mean as one sample"]
    verdicts_failed: Annotated[int, "responses without a valid verdict of the reward function"]
    length_mean_tokens: Annotated[float, "mean length of the responses"]
    length_p90_tokens: Annotated[float, "90th percentile of the lengths"]
    stopped: Annotated[int, "responses ended by the model, a stop string or a stop token"]
    cut: Annotated[int, "responses cut at their maximum length"]


class Evaluation:
    """An evaluation: an asynchronous iterator that yields each group once, as it finishes.

    ``evaluation_id`` and ``version`` are known after the first group or :meth:`begun`, ``reason`` at the end. Cancel an
    evaluation that you leave early. It ends with its connection: ServiceUnavailable is raised then, and the groups
    received so far are in ``groups``.
    """

    def __init__(self, connection: Connection, request: pb.EvaluateRequest) -> None:
        """Sends the request. Its errors are raised when the evaluation is awaited.

        Raises LimitExceeded before sending a message over the limit.
        """
        check_message_bytes("EvaluateRequest", request, connection.max_message_bytes)
        self.asked = len(request.prompts)
        self.evaluation_id = ""
        self.version = -1
        self.groups: list[TrajectoryGroup] = []  # groups already yielded
        self.refused: dict[str, str] = {}  # prompt id -> reason of the refusal
        self.reason = ""  # reason of an early end; empty if there was none
        self.ended = False
        self._connection = connection
        self._replies: Any = connection.stub(PromptsStub).Evaluate(request, metadata=connection.metadata)
        self._parts: list[pb.TrajectoryGroup] = []  # of a group whose other parts are still to come
        self._come: deque[TrajectoryGroup] = deque()

    @property
    def missing(self) -> int:
        """The number of prompts without a result."""
        return self.asked - len(self.groups) - len(self.refused)

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


def score_of(groups: Iterable[TrajectoryGroup]) -> Score:
    """Computes the statistics of the groups' responses."""
    groups = list(groups)
    trajectories = [each for group in groups for each in group.trajectories]
    tokens = np.asarray([each.length_tokens for each in trajectories], np.float64)
    means = [mean for group in groups if not math.isnan(mean := _mean(_rewards(group.trajectories)))]
    return Score(
        groups=len(groups),
        responses=len(trajectories),
        reward_mean=_mean(_rewards(trajectories)),
        reward_error=float(np.std(means, ddof=1) / math.sqrt(len(means))) if len(means) > 1 else math.nan,
        verdicts_failed=sum(not each.reward_valid for each in trajectories),
        length_mean_tokens=_mean(tokens.tolist()),
        length_p90_tokens=float(np.quantile(tokens, 0.9)) if len(tokens) else math.nan,
        stopped=sum(each.finish_reason == "stop" for each in trajectories),
        cut=sum(each.finish_reason == "length" for each in trajectories),
    )


def scores_by(groups: Iterable[TrajectoryGroup], column: Callable[[TrajectoryGroup], str]) -> dict[str, Score]:
    """Computes the statistics for each value of ``column``, in the order of the values."""
    parts: dict[str, list[TrajectoryGroup]] = {}
    for group in groups:
        parts.setdefault(column(group), []).append(group)
    return {key: score_of(parts[key]) for key in sorted(parts)}


def _rewards(trajectories: Iterable[Trajectory]) -> list[float]:
    return [each.reward for each in trajectories if each.reward_valid]


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else math.nan
