"""One life of a service: what it has of the life before it, and what its workers keep for the next one."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from dora.journal.durable import Durable
from dora.orchestrator.recovery.reattachment import Reattachment
from dora.orchestrator.rollout.journal import Journal
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.orchestrator.rollout.streams import WorkerSession
from dora.rpc import dora_pb2 as pb
from dora.system.awake import awake_s

SETTLE_S: Final = 5.0  # a worker has room for what ends in minutes, and each telling is a message to each worker


def _without_state() -> Reattachment:
    reattachment = Reattachment(())
    reattachment.close()
    return reattachment


@dataclass(slots=True)
class Incarnation:
    """Counts restarts in ``number``, and holds the durable state at the start in ``resumed``. Workers and hosts live
    for ``orphan_timeout_s`` without this service.
    """

    number: int = 0
    resumed: Durable = field(default_factory=Durable)
    orphan_timeout_s: float = 0.0
    reattachment: Reattachment = field(default_factory=_without_state)


@dataclass(eq=False, repr=False)
class DurableEnds:
    """Tells workers which ended responses, and turns of sessions, are durable. Until then they keep them for a restart.

    Does nothing for a service whose workers end with it.
    """

    _buffer: ResponseBuffer
    _journal: Journal
    _incarnation: Incarnation

    def __post_init__(self) -> None:
        # not yet durable: the journal's count at that time, and each request with the number of its turns
        self._settled_s = 0.0
        self._ended: deque[tuple[int, WorkerSession, Sequence[tuple[str, int]]]] = deque()

    def note(self, session: WorkerSession, request_ids: Sequence[str]) -> None:
        """Notes responses and turns that a worker has reported to their end."""
        if self._incarnation.orphan_timeout_s and request_ids:
            ended = [(each, len(self._buffer[each].inputs)) for each in request_ids]
            self._ended.append((self._journal.appended, session, ended))

    def settle(self) -> None:
        """Tells connected workers which of them have become durable, every ``SETTLE_S``."""
        if awake_s() < self._settled_s + SETTLE_S:
            return
        self._settled_s = awake_s()
        durable = self._journal.durable
        settled: dict[WorkerSession, list[str]] = {}
        while self._ended and self._ended[0][0] <= durable:
            _, session, ended = self._ended.popleft()
            if names := [name for name, turn in ended if self._is_turn(name, turn)]:
                settled.setdefault(session, []).extend(names)
        for session, request_ids in settled.items():
            session.send(pb.WorkerCommand(settled=pb.Settled(request_ids=request_ids)))

    def _is_turn(self, request_id: str, turn: int) -> bool:
        """Returns whether no later turn was requested: the worker would take it for the settled one."""
        entry = self._buffer.get(request_id)
        return entry is None or len(entry.inputs) == turn
