"""The trainer: whether one is present, the stream of its step, and the core's commands that concern it."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from dora.core import commands as do
from dora.errors import DoraError, VersionRejected
from dora.journal import records
from dora.orchestrator.rollout.core import Core, Handlers
from dora.orchestrator.rollout.journal import Journal
from dora.orchestrator.rollout.presence import TrainerPresence
from dora.orchestrator.rollout.record_queue import RecordQueue
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.orchestrator.rollout.streams import StepStream
from dora.orchestrator.rollout.window_wait import window_wait
from dora.rpc import dora_pb2 as pb
from dora.system.log_lines import about

log = logging.getLogger("dora.service")


@dataclass(eq=False, repr=False)
class Trainers:
    """Carries out the core's commands to trainers. ``published`` is told of each committed version."""

    _core: Core
    _buffer: ResponseBuffer
    _journal: Journal
    _recorder: RecordQueue

    def __post_init__(self) -> None:
        self.presence = TrainerPresence()
        self.stream: StepStream | None = None
        self.published: Callable[[int], None] = lambda version: None
        self.handlers: Handlers = {
            do.DeliverGroup: self._deliver_group,
            do.CloseStep: self._close_step,
            do.LapseLease: self._lapse_lease,
            do.RejectVersion: self._reject_version,
        }

    def is_expected(self) -> bool:
        """Returns whether a trainer streams, trains on leased groups, or did so a moment ago."""
        return self.presence.is_expected(self._holds())

    def shown(self) -> str:
        """Returns the name of the attached trainer, or an empty text if there is none or it has left."""
        return self.presence.name if self.presence.is_there(self._holds()) else ""

    def window_wait(self) -> pb.WindowWait | None:
        """Returns what a full window waits for, or None if it has room or is closed."""
        return window_wait(self._core.state, self._buffer, self.shown())

    def _holds(self) -> bool:
        return self.stream is not None or bool(self._core.state.leased)

    def replace_stream(self, stream: StepStream | None) -> None:
        """Opens a stream in place of the one before, which ends."""
        before, self.stream = self.stream, stream
        if before is not None:
            before.close(superseded=True)

    def stream_of(self, trainer_epoch: int, step: int) -> StepStream | None:
        """Returns the open stream of this step, or None."""
        stream = self.stream
        if stream is not None and (stream.trainer_epoch, stream.step) == (trainer_epoch, step):
            return stream
        return None

    def _deliver_group(self, command: do.DeliverGroup) -> None:
        group, first = self._buffer.deliver(command.group_id, command.step)
        if first:
            self._journal.note(records.Leased(self._buffer.number(command.group_id), command.step))
            self._recorder.delivered(group)
        stream = self.stream_of(command.trainer_epoch, command.step)
        if stream is not None:
            stream.put(group)

    def _close_step(self, command: do.CloseStep) -> None:
        stream = self.stream_of(command.trainer_epoch, command.step)
        if stream is not None:
            stream.close(exhausted=command.exhausted)
            self.stream = None

    def _lapse_lease(self, command: do.LapseLease) -> None:
        name = self.shown()
        if name:  # otherwise it has left, and nobody is kept out
            allowed = "another may attach without take_over, and gets the groups of its step"
            log.warning("trainer %s: %s; %s", name, command.reason, allowed)

    def _reject_version(self, command: do.RejectVersion) -> None:
        error = VersionRejected(command.version, command.reason, command.worker_ids, command.canary_difference)
        log.error("%s", error, extra=about(version=command.version))
        if command.worker_ids:  # otherwise the weights were right, and a start that carries on has its own copy
            self._journal.note(
                records.Rejected(command.version, command.reason, list(command.worker_ids), command.canary_difference)
            )
            self._recorder.withdrawn(command.version)
        self.fail(error)

    def fail(self, error: DoraError) -> None:
        """Ends the open stream with an error."""
        if self.stream is not None:
            self.stream.close(error=error)
            self.stream = None
