"""The shell's side of evaluations: their prompts and responses, and the open calls that receive the results.

The core decides what begins and ends (core/rules/evaluation.py). Results that the caller does not read accumulate up to
a bound, at which the evaluation ends.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Final

from dora.core import commands as do
from dora.core import events as on
from dora.data.trajectory import TrajectoryGroup
from dora.data.types import Prompt
from dora.errors import Conflict
from dora.orchestrator.rollout.core import Core, Handlers
from dora.orchestrator.rollout.environments import Environments
from dora.orchestrator.rollout.prompt_ledger import memory_bytes
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.orchestrator.rollout.responses.state import ResponseState
from dora.rpc.errors import LimitExceeded

PROMPT_BYTES_MAX: Final = 256 << 20  # prompts of all running evaluations, in memory
UNREAD_BYTES_MAX: Final = 64 << 20  # results of one evaluation
TOKEN_BYTES: Final = 16  # a token of a result, with its logprob and overhead
UNREAD: Final = f"its results are not read: over {UNREAD_BYTES_MAX >> 20} MiB are waiting"

Refused = tuple[str, str]  # a prompt's id, and the reason of its refusal


class EvaluationStream:
    """Streams one Evaluate call: finished groups and refused prompts, then the end."""

    def __init__(self, evaluation_id: str, name: str, prompts: dict[str, Prompt]) -> None:
        self.evaluation_id = evaluation_id
        self.name = name
        self.todo = prompts  # by id; not yet begun
        self.prompt_bytes = sum(map(memory_bytes, prompts.values()))
        self.requested_at = time.time()
        self.responses: dict[str, tuple[ResponseState, ...]] = {}  # running groups
        self.unread_bytes = 0
        self.reason = ""  # reason of an early end
        self._queue: asyncio.Queue[TrajectoryGroup | Refused | None] = asyncio.Queue()

    def put(self, result: TrajectoryGroup | Refused) -> None:
        self.unread_bytes += _bytes(result)
        self._queue.put_nowait(result)

    def close(self, reason: str) -> None:
        """Ends the stream. ``reason`` is an early end's; it is empty if all prompts are done."""
        self.reason = reason
        self._queue.put_nowait(None)

    async def results(self) -> AsyncIterator[TrajectoryGroup | Refused]:
        while (result := await self._queue.get()) is not None:
            self.unread_bytes -= _bytes(result)
            yield result


class Evaluations:
    """Holds the running evaluations. ``incarnation`` counts the service's restarts, so that no id repeats."""

    def __init__(self, core: Core, buffer: ResponseBuffer, environments: Environments) -> None:
        self._core = core
        self._buffer = buffer
        self._environments = environments
        self._requested = 0
        self.incarnation = 0
        self.running: dict[str, EvaluationStream] = {}
        self.handlers: Handlers = {
            do.BeginEvaluationGroup: self._begin_group,
            do.EndEvaluationGroup: self._end_group,
            do.EndEvaluation: self._end,
        }

    def prepared(self, name: str, prompts: Sequence[Prompt]) -> EvaluationStream:
        """Returns an evaluation to ask the core for. Raises Conflict, or LimitExceeded if memory has no room."""
        by_id: dict[str, Prompt] = {}
        for prompt in prompts:
            if prompt.prompt_id in by_id:
                raise Conflict("prompt_id", prompt.prompt_id, "a different id for each prompt", why="is given twice")
            by_id[prompt.prompt_id] = prompt
        self._requested += 1
        life = f"-{self.incarnation}" if self.incarnation else ""
        stream = EvaluationStream(f"e{self._requested}{life}", name, by_id)
        left_bytes = PROMPT_BYTES_MAX - sum(each.prompt_bytes for each in self.running.values())
        if stream.prompt_bytes > left_bytes:
            raise LimitExceeded("prompts: bytes in memory", stream.prompt_bytes, f"at most {left_bytes} now")
        return stream

    def open(self, stream: EvaluationStream) -> None:
        """Opens an evaluation that the core has accepted."""
        self.running[stream.evaluation_id] = stream

    def end_soon(self, evaluation_id: str, reason: str) -> None:
        """Ends an evaluation after the current event, if it still runs then."""

        def end() -> None:
            if evaluation_id in self.running:
                self._core.post(on.EvaluationCancelled(evaluation_id, reason))

        self._core.soon(end)

    def _begin_group(self, command: do.BeginEvaluationGroup) -> None:
        stream = self.running[command.evaluation_id]
        prompt = stream.todo.pop(command.prompt_id)
        row_of = self._core.state.evaluations.row_of
        rows = {request_id: row_of[request_id] for request_id in command.request_ids}
        stream.responses[command.group_id] = self._buffer.begin(
            command.group_id, prompt, command.version, rows, self._core.now()
        )
        if not prompt.token_ids:
            for request_id in command.request_ids:
                self._environments.idles(request_id)

    def members(self, group_id: str) -> tuple[ResponseState, ...]:
        """Returns the responses of a running group in order of its samples, or none if there is no such group."""
        found = (stream.responses[group_id] for stream in self.running.values() if group_id in stream.responses)
        return next(found, ())

    def replace(self, before: ResponseState, after: ResponseState) -> None:
        """Puts a session into the place of another one of its group."""
        for stream in self.running.values():
            if before.group_id in stream.responses:
                members = stream.responses[before.group_id]
                stream.responses[before.group_id] = tuple(after if each is before else each for each in members)

    def _end_group(self, command: do.EndEvaluationGroup) -> None:
        stream = self.running[command.evaluation_id]
        responses = stream.responses.pop(command.group_id)
        self._forget(responses)
        if command.reason:
            stream.put((responses[0].prompt.prompt_id, command.reason))
        else:
            stream.put(self._buffer.group_of(responses, responses[0].version))
        if stream.unread_bytes > UNREAD_BYTES_MAX:
            self.end_soon(command.evaluation_id, UNREAD)

    def _end(self, command: do.EndEvaluation) -> None:
        stream = self.running.pop(command.evaluation_id)
        for responses in stream.responses.values():
            self._forget(responses)
        stream.close(command.reason)

    def _forget(self, responses: tuple[ResponseState, ...]) -> None:
        self._buffer.end(responses)
        for response in responses if responses[0].is_session else ():
            self._environments.over(response.request_id)


def _bytes(result: TrajectoryGroup | Refused) -> int:
    if not isinstance(result, TrajectoryGroup):
        return sum(map(len, result))
    return sum(
        TOKEN_BYTES * (len(each.prompt_token_ids) + each.length_tokens)
        + (0 if each.routed_experts is None else each.routed_experts.nbytes)
        for each in result.trajectories
    )
