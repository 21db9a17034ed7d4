"""The Evaluate call: prompts in, finished groups of one version out, then the reason of the end."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from typing import Final

from dora.core import events as on
from dora.core.rules.evaluation import RESPONSES_MAX
from dora.data.trajectory import TrajectoryGroup
from dora.data.types import Prompt
from dora.errors import DoraError, InvalidValue
from dora.orchestrator.rollout.evaluations import EvaluationStream
from dora.orchestrator.rollout.feed import driven
from dora.orchestrator.runtime import Runtime
from dora.prompts.traits import features_of, key_of
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from dora.rpc.errors import ServicerContext

NAME_MAX: Final = 128  # characters
CALLER_LEFT: Final = "its caller disconnected"


async def evaluating(
    runtime: Runtime, request: pb.EvaluateRequest, reading: asyncio.Lock, context: ServicerContext
) -> AsyncIterator[pb.EvaluationPart]:
    """Runs one evaluation and streams its results. ``reading``: held while prompts are decoded.

    Raises InvalidValue, Conflict, NotFound or LimitExceeded if it cannot begin.
    """
    stream = await _begun(runtime, request, reading)
    evaluation_id = stream.evaluation_id
    version = runtime.machine.state.evaluations.running[evaluation_id].version
    context.add_done_callback(lambda _: runtime.end_evaluation(evaluation_id, CALLER_LEFT))  # type: ignore[arg-type]
    del request  # it may be large, and the call is long
    yield pb.EvaluationPart(evaluation_id=evaluation_id, version=version)
    limit_bytes = runtime.config.service.max_message_bytes
    async for result in stream.results():
        if isinstance(result, TrajectoryGroup):
            for batch in convert.trajectory_batches(version, [result], max_message_bytes=limit_bytes):
                yield pb.EvaluationPart(groups=batch.groups)
        else:
            prompt_id, reason = result
            yield pb.EvaluationPart(refused=[pb.RefusedPrompt(prompt_id=prompt_id, reason=reason)])
    yield pb.EvaluationPart(end=pb.EvaluationEnd(reason=stream.reason))


async def _begun(runtime: Runtime, request: pb.EvaluateRequest, reading: asyncio.Lock) -> EvaluationStream:
    """Raises InvalidValue, Conflict, NotFound or LimitExceeded."""
    if not request.name.isprintable() or len(request.name) > NAME_MAX:
        raise InvalidValue("name", request.name, f"printable, of at most {NAME_MAX} characters")
    if not 1 <= len(request.prompts) <= RESPONSES_MAX:
        raise InvalidValue("prompts", len(request.prompts), f"1 to {RESPONSES_MAX:,}")
    if not math.isfinite(request.share):
        raise InvalidValue("share", request.share, "a finite number")
    check = runtime.feed.check
    async with reading:
        prompts = await asyncio.to_thread(lambda: [check.from_wire(prompt) for prompt in request.prompts])
    prompts = [driven(prompt, runtime.config) if prompt.environment else prompt for prompt in prompts]
    version = request.version if request.HasField("version") else on.NEWEST
    return begin(runtime, request.name, prompts, version, request.share)


def begin(runtime: Runtime, name: str, prompts: Sequence[Prompt], version: int, share: float) -> EvaluationStream:
    """Begins an evaluation of checked prompts. Raises InvalidValue, Conflict, NotFound or LimitExceeded."""
    stream = runtime.evaluations.open(name, prompts)
    offered = tuple(
        on.OfferedPrompt(
            prompt.prompt_id,
            prompt.task_id,
            len(prompt.token_ids),
            prompt.group_size,
            runtime.buffer.sampling(prompt).max_tokens,
            key_of(prompt),
            features_of(prompt),
            sessions=bool(prompt.environment),
        )
        for prompt in prompts
    )
    try:
        runtime.post(on.EvaluationAsked(stream.evaluation_id, offered, version, share))
    except DoraError:
        runtime.evaluations.refused(stream)
        raise
    return stream


def evaluations_of(runtime: Runtime) -> list[pb.EvaluationStatus]:
    """The running evaluations in the order of their calls."""
    core = runtime.machine.state.evaluations
    found: list[pb.EvaluationStatus] = []
    for evaluation_id, stream in runtime.evaluations.running.items():
        evaluation = core.running[evaluation_id]
        mine = [each for each in core.requests.values() if each.evaluation_id == evaluation_id]
        found.append(
            pb.EvaluationStatus(
                evaluation_id=evaluation_id,
                name=stream.name,
                version=evaluation.version,
                share=evaluation.share,
                prompts=evaluation.asked,
                prompts_done=evaluation.done + evaluation.refused,
                running=sum(bool(each.worker_id) for each in mine),
                waiting=len(evaluation.waiting),
                idle=len(evaluation.idle),
                preempted=evaluation.preempted,
                asked_at=stream.asked_at,
            )
        )
    return found
