"""The reason for which a service admits no more prompts, the groups that it waits for, and the remedy."""

import time

import numpy as np

from dora.core.state import GroupStatus
from dora.orchestrator.runtime import Runtime
from dora.rpc import dora_pb2 as pb


def draining_of(runtime: Runtime) -> pb.Draining | None:
    """None while the service admits prompts."""
    if not runtime.feed.closed:
        return None
    waits_for = _waits_for(runtime)
    ended, more = _ended(runtime)
    if runtime.drain_ends_s is not None:
        left_s = max(0.0, runtime.drain_ends_s - time.monotonic())
        remedy = f"commit within {left_s:.0f} s (service.drain_timeout_s), or press Ctrl-C again to end at once"
    elif waits_for:
        remedy = f"let a trainer commit what is left; then {more}"
    else:
        remedy = f"end the service with Ctrl-C or SIGTERM; {more}"
    return pb.Draining(ended=ended, waits_for=waits_for, remedy=remedy)


def ended_line(runtime: Runtime) -> str:
    """The message to a trainer that gets no more groups: the reason, and how to train further."""
    ended, more = _ended(runtime)
    return f"{ended}; {more}"


def _ended(runtime: Runtime) -> tuple[str, str]:
    """Returns the reason for which no more prompts are admitted, and how to train further."""
    service = runtime.config.service
    where = f"start a service on {service.state} again" if service.state else "start a new service"
    if runtime.drain_ends_s is not None:
        return "the service was asked to stop", "to train further, start a new service"
    if runtime.feed.ledger.ended:
        return "a client has ended the prompts", "to train further, start a new service"
    source = runtime.config.prompts.source
    more = "more prompts.epochs, another prompts.source, or prompts.then = wait"
    return f"the prompts of {source} have ended", f"to train further, {where} with {more}"


def _waits_for(runtime: Runtime) -> str:
    state = runtime.machine.state
    status, leased = state.groups["status"], len(state.leased)
    parts = [
        (int(np.count_nonzero(status == GroupStatus.OPEN)), "to be generated"),
        (int(np.count_nonzero(status == GroupStatus.FINISHED)), "to be taken by a trainer"),
        (leased, "to be committed by the trainer"),
    ]
    told = [f"{count:,} {'group' if count == 1 else 'groups'} {what}" for count, what in parts if count]
    if told and not runtime.trainer_shown():
        told.append("a trainer, as none is attached")
    return ", ".join(told)
