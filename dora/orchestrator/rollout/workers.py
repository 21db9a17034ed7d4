"""Sends the core's commands to workers and pools."""

import logging
from dataclasses import dataclass
from typing import Final, get_args

from dora.core import commands as do
from dora.core import events as on
from dora.core.handoff.table import FROM_POOL, HandoffKind
from dora.errors import NotFound
from dora.orchestrator.rollout.core import Core, Handlers
from dora.orchestrator.rollout.history import FleetHistory
from dora.orchestrator.rollout.orders import HostVersions, worker_message
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.orchestrator.rollout.streams import MemberSessions, WorkerSession
from dora.rpc import dora_pb2 as pb
from dora.system.log_lines import about

log = logging.getLogger("dora.service")

SENT: Final[tuple[type, ...]] = tuple(each for each in get_args(do.Command) if issubclass(each, do.WorkerCommand))


@dataclass(eq=False, repr=False)
class Workers:
    """Sends commands to workers and pools. Drops those to ended epochs: the core is about to learn of the loss."""

    _core: Core
    _buffer: ResponseBuffer
    _sessions: MemberSessions
    _hosts: HostVersions
    _history: FleetHistory

    def __post_init__(self) -> None:
        self.handlers: Handlers = {
            **dict.fromkeys(SENT, self._send),
            do.EvictWorker: self._evict,
            do.StopWorker: lambda command: self._sessions.release(command.worker_id, command.epoch),
            do.RestartWorker: self._restart,
            do.ReleaseSnapshot: lambda command: None,  # it lies at its target, which was told to import it or drop it
        }

    def _send(self, command: do.WorkerCommand) -> None:
        session = self._sessions.of_epoch(command.worker_id, command.epoch)
        if session is None:
            return
        if isinstance(command, do.StartRequest | do.CopyIn) and isinstance(session, WorkerSession):
            self._history.introduce(session, command.request_id)
        try:
            session.send(self._message(command))
        except (NotFound, OSError) as error:  # the store no longer knows the version's name
            if not isinstance(command, do.LoadVersion):
                raise
            which = about(worker=command.worker_id, version=command.version)
            log.error("%s cannot load version %d: %s", command.worker_id, command.version, error, extra=which)
            self._core.spawn(self._cannot_load(command, str(error)))

    async def _cannot_load(self, command: do.LoadVersion, error: str) -> None:
        """Reports a failed load for the worker. If the worker is on another host, that host may have the version."""
        kind = "missing" if self._hosts.shares_store(command.worker_id) else "refused"
        self._core.post(on.CommandDone(command.worker_id, command.epoch, command.command_id, False, error, kind))
        self._hosts.look_at_store(command.version)

    def _message(self, command: do.WorkerCommand) -> pb.WorkerCommand:
        """Builds the wire message. Each end of a handoff gets the address of the other, if that is connected."""
        pending = self._core.state.pending.get(command.command_id)
        handoff = pending.handoff if pending is not None else None
        if handoff is not None and handoff.overdue and isinstance(command, do.CancelReservation):
            ends = f"{handoff.source} to {handoff.target}"
            which = about(request=handoff.request_id)
            log.warning(
                "%s: its handoff from %s was undone: %s", handoff.request_id, ends, handoff.overdue, extra=which
            )
        if handoff is None:
            return worker_message(command, self._buffer, self._hosts)
        source, target = self._sessions.end(handoff.source), self._sessions.end(handoff.target)
        measure = source
        if handoff.kind is HandoffKind.CARRY:  # a pool does not know how large a token's KV is
            measure = next(iter(self._sessions.workers.values()), None)
        was_parked, has_pool = handoff.kind in FROM_POOL, bool(self._sessions.pools)
        return worker_message(command, self._buffer, self._hosts, source, target, measure, was_parked, has_pool)

    def _evict(self, command: do.EvictWorker) -> None:
        session = self._sessions.of_epoch(command.worker_id, command.epoch)
        if session is not None:
            self._sessions.replace(session, command.reason)

    def _restart(self, command: do.RestartWorker) -> None:
        which = about(worker=command.worker_id)
        precision = "full" if command.full_precision else "the configured"
        log.info("%s starts its engine again in %s precision", command.worker_id, precision, extra=which)
        self._sessions.restart(command.worker_id, command.epoch, full_precision=command.full_precision)
