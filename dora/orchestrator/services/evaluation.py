"""The Evaluate call: prompts in, finished groups of one version out, then the reason of the end."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from dora.config import Config
from dora.core import events as on
from dora.core.rules.evaluation import RESPONSES_MAX
from dora.data.trajectory import TrajectoryGroup
from dora.data.types import Prompt
from dora.errors import InvalidValue
from dora.orchestrator.core import ServiceCore
from dora.orchestrator.rollout.evaluations import Evaluations, EvaluationStream
from dora.orchestrator.rollout.feed import driven
from dora.orchestrator.rollout.prompt_check import PromptCheck
from dora.orchestrator.rollout.prompts import offer
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from dora.rpc.errors import ServicerContext

NAME_MAX: Final = 128  # characters
CALLER_LEFT: Final = "its caller disconnected"


@dataclass(eq=False, repr=False)
class Evaluating:
    """Begins evaluations, and streams their results."""

    _config: Config
    _core: ServiceCore
    _check: PromptCheck
    _buffer: ResponseBuffer
    _evaluations: Evaluations

    async def run(
        self, request: pb.EvaluateRequest, reading: asyncio.Lock, context: ServicerContext
    ) -> AsyncIterator[pb.EvaluationPart]:
        """Runs one evaluation and streams its results. Holds ``reading`` while prompts are decoded.

        Raises InvalidValue, Conflict, NotFound or LimitExceeded if it cannot begin.
        """
        stream = await self._begun(request, reading)
        evaluation_id = stream.evaluation_id
        version = self._core.state.evaluations.running[evaluation_id].version
        ended = self._evaluations.end_soon
        context.add_done_callback(lambda _: ended(evaluation_id, CALLER_LEFT))  # type: ignore[arg-type]
        del request  # it may be large, and the call is long
        yield pb.EvaluationPart(evaluation_id=evaluation_id, version=version)
        limit_bytes = self._config.service.max_message_bytes
        async for result in stream.results():
            if isinstance(result, TrajectoryGroup):
                for batch in convert.trajectory_batches(version, [result], max_message_bytes=limit_bytes):
                    yield pb.EvaluationPart(groups=batch.groups)
            else:
                prompt_id, reason = result
                yield pb.EvaluationPart(refused=[pb.RefusedPrompt(prompt_id=prompt_id, reason=reason)])
        yield pb.EvaluationPart(end=pb.EvaluationEnd(reason=stream.reason))

    async def _begun(self, request: pb.EvaluateRequest, reading: asyncio.Lock) -> EvaluationStream:
        """Raises InvalidValue, Conflict, NotFound or LimitExceeded."""
        if not request.name.isprintable() or len(request.name) > NAME_MAX:
            raise InvalidValue("name", request.name, f"printable, of at most {NAME_MAX} characters")
        if not 1 <= len(request.prompts) <= RESPONSES_MAX:
            raise InvalidValue("prompts", len(request.prompts), f"1 to {RESPONSES_MAX:,}")
        if not math.isfinite(request.share):
            raise InvalidValue("share", request.share, "a finite number")
        check, config = self._check, self._config
        async with reading:
            prompts = await asyncio.to_thread(lambda: [check.from_wire(prompt) for prompt in request.prompts])
        prompts = [driven(prompt, config) if prompt.environment else prompt for prompt in prompts]
        version = request.version if request.HasField("version") else on.NEWEST
        return self.begin(request.name, prompts, version, request.share)

    def begin(self, name: str, prompts: Sequence[Prompt], version: int, share: float) -> EvaluationStream:
        """Begins an evaluation of checked prompts. Raises InvalidValue, Conflict, NotFound or LimitExceeded."""
        stream = self._evaluations.prepared(name, prompts)
        offered = tuple(replace(offer(self._buffer, each), priority=0, group_size_min=0) for each in prompts)
        asked = on.EvaluationRequested(stream.evaluation_id, offered, version, share)
        self._core.post(asked, lambda: self._evaluations.open(stream))
        return stream

    def statuses(self) -> list[pb.EvaluationStatus]:
        """Returns the running evaluations in the order of their calls."""
        core = self._core.state.evaluations
        found: list[pb.EvaluationStatus] = []
        for evaluation_id, stream in self._evaluations.running.items():
            evaluation = core.running[evaluation_id]
            mine = [each for each in core.requests.values() if each.evaluation_id == evaluation_id]
            found.append(
                pb.EvaluationStatus(
                    evaluation_id=evaluation_id,
                    name=stream.name,
                    version=evaluation.version,
                    share=evaluation.share,
                    prompts=evaluation.requested,
                    prompts_done=evaluation.done + evaluation.refused,
                    running=sum(bool(each.worker_id) for each in mine),
                    waiting=len(evaluation.waiting),
                    idle=len(evaluation.idle),
                    preempted=evaluation.preempted,
                    asked_at=stream.requested_at,
                )
            )
        return found
