"""The reason for which a service admits no more prompts, the groups that it waits for, and the remedy."""

from dataclasses import dataclass

import numpy as np

from dora.config import Config
from dora.core.state import GroupStatus
from dora.orchestrator.rollout.core import Core
from dora.orchestrator.rollout.feed import PromptFeed
from dora.orchestrator.rollout.trainers import Trainers
from dora.rpc import dora_pb2 as pb
from dora.system.awake import awake_s


@dataclass(eq=False, repr=False)
class Draining:
    """Tells how a drain proceeds. It ends at ``ends_s`` on the monotonic clock, if a stop has begun it."""

    _config: Config
    _core: Core
    _feed: PromptFeed
    _trainers: Trainers

    def __post_init__(self) -> None:
        self.ends_s: float | None = None

    def status(self) -> pb.Draining | None:
        """Returns the drain's status, or None while the service admits prompts."""
        if not self._feed.closed:
            return None
        waits_for = self._waits_for()
        ended, more = self._ended()
        if self.ends_s is not None:
            left_s = max(0.0, self.ends_s - awake_s())
            remedy = f"commit within {left_s:.0f} s (service.drain_timeout_s), or press Ctrl-C again to end at once"
        elif waits_for:
            remedy = f"let a trainer commit what is left; then {more}"
        else:
            remedy = f"end the service with Ctrl-C or SIGTERM; {more}"
        return pb.Draining(ended=ended, waits_for=waits_for, remedy=remedy)

    def ended_line(self) -> str:
        """Returns the message to a trainer that gets no more groups: the reason, and how to train further."""
        ended, more = self._ended()
        return f"{ended}; {more}"

    def _ended(self) -> tuple[str, str]:
        service = self._config.service
        where = f"start a service on {service.state} again" if service.state else "start a new service"
        if self.ends_s is not None:
            return "the service was asked to stop", "to train further, start a new service"
        if self._feed.ledger.ended:
            return "a client has ended the prompts", "to train further, start a new service"
        more = "more prompts.epochs, another prompts.source, or prompts.then = wait"
        return f"the prompts of {self._config.prompts.source} have ended", f"to train further, {where} with {more}"

    def _waits_for(self) -> str:
        state = self._core.state
        status, leased = state.groups["status"], len(state.leased)
        parts = [
            (int(np.count_nonzero(status == GroupStatus.OPEN)), "to be generated"),
            (int(np.count_nonzero(status == GroupStatus.FINISHED)), "to be taken by a trainer"),
            (leased, "to be committed by the trainer"),
        ]
        told = [f"{count:,} {'group' if count == 1 else 'groups'} {what}" for count, what in parts if count]
        if told and not self._trainers.shown():
            told.append("a trainer, as none is attached")
        return ", ".join(told)
