"""Carries out what the core decided: one function a command, over the runtime.

A command's outcome, where it has one, comes back as exactly one event, posted by what waits in the background here
(prompts drawn, a response scored) or by the worker that was told.
"""

import functools
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dora.orchestrator.book import sampling_of
from dora.orchestrator.core import commands as do
from dora.orchestrator.core import events as on
from dora.orchestrator.orders import worker_message
from dora.orchestrator.sessions import StepStream, WorkerSession
from dora.prompts.traits import features_of, key_of
from dora.rpc import dora_pb2 as pb

if TYPE_CHECKING:
    from dora.orchestrator.runtime import Runtime

log = logging.getLogger("dora.service")


def carry_out(runtime: "Runtime", command: do.Command) -> None:
    """Runs one command; what would wait goes on in the background. An exception here is a bug."""
    if isinstance(command, do.WorkerCommand):
        _to_worker(runtime, command)
    else:
        _CARRY_OUT[type(command)](runtime, command)


# ------------------------------------------------------------------------------------------------- prompts and groups


def _draw_prompts(runtime: "Runtime", command: do.DrawPrompts) -> None:
    async def draw() -> None:
        prompts, exhausted = await runtime.feed.take(command.count)
        runtime.drawn.update((prompt.prompt_id, prompt) for prompt in prompts)
        offered = tuple(
            on.OfferedPrompt(
                prompt.prompt_id,
                prompt.task_id,
                len(prompt.token_ids),
                prompt.group_size,
                sampling_of(runtime.config.rollout, prompt).max_tokens,
                key_of(prompt),
                features_of(prompt),
            )
            for prompt in prompts
        )
        runtime.post(on.PromptsOffered(offered, exhausted))

    runtime.spawn(draw())


def _admit_group(runtime: "Runtime", command: do.AdmitGroup) -> None:
    prompt = runtime.drawn.pop(command.prompt_id)
    runtime.book.admit(command.group_id, prompt, command.version, command.request_ids, time.time())


def _score_request(runtime: "Runtime", command: do.ScoreRequest) -> None:
    entry = runtime.book[command.request_id]

    async def score() -> None:
        prompt = entry.prompt
        reward = await runtime.verifier.score(prompt.text, None, tuple(entry.tokens), prompt.verifier_json)
        if not reward.valid:
            runtime.telemetry.rewards_failed += 1
            log.error("%s: %s", entry.request_id, reward.log)
        entry.reward = reward
        runtime.telemetry.trajectories_finished += 1
        runtime.post(on.RequestScored(entry.request_id))

    runtime.spawn(score())


def _drop_group(runtime: "Runtime", command: do.DropGroup) -> None:
    log.warning("group %s was cancelled: %s", command.group_id, command.reason)
    runtime.feed.release(runtime.book.forget(command.group_id).prompt_id)


def _forget_group(runtime: "Runtime", command: do.ForgetGroup) -> None:
    runtime.feed.release(runtime.book.forget(command.group_id).prompt_id)


# ------------------------------------------------------------------------------------------------------------ trainer


def _deliver_group(runtime: "Runtime", command: do.DeliverGroup) -> None:
    group, first = runtime.book.deliver(command.group_id, command.step)
    if first and runtime.recorder is not None:
        runtime.record(functools.partial(runtime.recorder.append, group.trajectories))
    stream = _stream_of(runtime, command)
    if stream is not None:
        stream.put(group)


def _close_step(runtime: "Runtime", command: do.CloseStep) -> None:
    stream = _stream_of(runtime, command)
    if stream is not None:
        stream.close(exhausted=command.exhausted)
        runtime.stream = None


def _stream_of(runtime: "Runtime", command: do.DeliverGroup | do.CloseStep) -> StepStream | None:
    """The open stream, where it is the one that the command means."""
    stream = runtime.stream
    if stream is not None and (stream.trainer_epoch, stream.step) == (command.trainer_epoch, command.step):
        return stream
    return None


def _retire_version(runtime: "Runtime", command: do.RetireVersion) -> None:
    if runtime.recorder is not None:  # after its copy was recorded
        runtime.record(functools.partial(runtime.store.retire, command.version))
    else:
        runtime.store.retire(command.version)


# ------------------------------------------------------------------------------------------------------------ workers


def _to_worker(runtime: "Runtime", command: do.WorkerCommand) -> None:
    session = _session_of(runtime, command)
    if session is not None:  # else it broke a moment ago; its loss is on the way to the core
        session.send(worker_message(command, runtime.book, runtime.store))


def _release_snapshot(runtime: "Runtime", command: do.ReleaseSnapshot) -> None:
    runtime.transport.release(command.locator)


def _evict_worker(runtime: "Runtime", command: do.EvictWorker) -> None:
    session = _session_of(runtime, command)
    if session is not None:
        runtime.replace(session, command.reason)


def _stop_worker(runtime: "Runtime", command: do.StopWorker) -> None:
    runtime.lost_reasons[command.worker_id] = "drained"
    if runtime.processes is not None:
        runtime.processes.let_go(command.worker_id)
    session = _session_of(runtime, command)
    if session is not None:
        session.send(pb.WorkerCommand(shutdown=pb.Shutdown()))
        session.finish()


def _session_of(runtime: "Runtime", command: do.WorkerCommand | do.EvictWorker | do.StopWorker) -> WorkerSession | None:
    """The connection of the worker's epoch that the command is for; None once it is over."""
    session = runtime.sessions.get(command.worker_id)
    return session if session is not None and session.epoch == command.epoch else None


_CARRY_OUT: dict[type, Callable[["Runtime", Any], None]] = {
    do.DrawPrompts: _draw_prompts,
    do.AdmitGroup: _admit_group,
    do.ScoreRequest: _score_request,
    do.DropGroup: _drop_group,
    do.DeliverGroup: _deliver_group,
    do.CloseStep: _close_step,
    do.ForgetGroup: _forget_group,
    do.RetireVersion: _retire_version,
    do.ReleaseSnapshot: _release_snapshot,
    do.EvictWorker: _evict_worker,
    do.StopWorker: _stop_worker,
}
