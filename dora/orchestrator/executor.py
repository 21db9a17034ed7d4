"""Carries out what the core decided: one function a command, over the runtime.

A command's outcome, where it has one, comes back as exactly one event, posted by what waits in the background here
(prompts drawn, a response scored) or by the worker that was told.
"""

import functools
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from dora.orchestrator.book import Entry, sampling_of
from dora.orchestrator.core import commands as do
from dora.orchestrator.core import events as on
from dora.orchestrator.core.selection import REDUNDANT
from dora.orchestrator.orders import worker_message
from dora.orchestrator.sessions import StepStream, WorkerSession
from dora.prompts.traits import features_of, key_of
from dora.record import CancelledGroup
from dora.rpc import dora_pb2 as pb

if TYPE_CHECKING:
    from dora.orchestrator.runtime import Runtime

log = logging.getLogger("dora.service")

FILTERED: Final = "filtered: "  # a reason; the filter's name follows


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
        if await _filtered(runtime, entry):
            return
        runtime.post(on.RequestScored(entry.request_id))

    runtime.spawn(score())


async def _filtered(runtime: "Runtime", entry: Entry) -> bool:
    """Whether this verdict, the last of its group, lets the user's filter cancel the group: no step has seen it yet.

    A group with a verdict that failed is kept: nothing says what it teaches.
    """
    chosen, group_id = runtime.group_filter, entry.group_id
    if chosen is None or runtime.book.get(entry.request_id) is None:
        return False
    rewards = runtime.book.rewards(group_id)
    if rewards is None or not all(reward.valid for reward in rewards):
        return False
    values = [reward.value for reward in rewards]
    kept = await chosen.keeps(entry.prompt.text, values, entry.prompt.verifier_json)
    if kept or runtime.book.get(entry.request_id) is None:  # it may have been cancelled meanwhile
        return False
    runtime.telemetry.groups_filtered += 1
    runtime.post(on.GroupCancelled(group_id, f"{FILTERED}{chosen.name}"))
    return True


def _drop_group(runtime: "Runtime", command: do.DropGroup) -> None:
    chosen = command.reason == REDUNDANT or command.reason.startswith(FILTERED)
    log.log(logging.INFO if chosen else logging.WARNING, "group %s was cancelled: %s", command.group_id, command.reason)
    entries = runtime.book.forget(command.group_id)
    if runtime.recorder is not None:
        cancelled = _cancelled(entries, command, time.time())
        runtime.record(functools.partial(runtime.recorder.append_cancelled, cancelled))
    runtime.feed.release(entries[0].prompt.prompt_id)


def _cancelled(entries: tuple[Entry, ...], command: do.DropGroup, at: float) -> CancelledGroup:
    return CancelledGroup(
        group_id=command.group_id,
        prompt_id=entries[0].prompt.prompt_id,
        task_id=entries[0].prompt.task_id,
        version=entries[0].version,
        reason=command.reason,
        length_tokens=tuple(len(entry.tokens) for entry in entries),
        rewards=tuple(entry.reward.value if entry.reward and entry.reward.valid else None for entry in entries),
        cancelled_at=at,
    )


def _forget_group(runtime: "Runtime", command: do.ForgetGroup) -> None:
    entries = runtime.book.forget(command.group_id)
    runtime.feed.release(entries[0].prompt.prompt_id)


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
    runtime.keep_reason(command.worker_id, "drained")
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
