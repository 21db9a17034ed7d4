"""The fleet's history: workers draft from what others sampled for a prompt, or in sessions of a task.

    a response or turn ends ──▶ workers that have requests of its prompt, or sessions of its task
    a request goes to a worker ──▶ it gets what it lacks of these first

Nothing depends on it but the speed of engines (``workers.speculation``), so no log has it: a restarted service begins
with an empty history, and sends it to a restarted worker again.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

import numpy as np

from dora.data.remembered import PROMPT_TOKENS, REMEMBERED_TOKENS_MAX, scope_of, task_scope_of
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.orchestrator.rollout.responses.state import ResponseState
from dora.orchestrator.rollout.streams import MemberSessions, WorkerSession
from dora.rpc import dora_pb2 as pb

RESPONSES_MAX: Final = 16  # of one prompt or task, the latest
ENTRY_BYTES: Final = 200  # of an entry beside its tokens
SCOPES_TOLD_MAX: Final = 16_384  # of one worker; beyond them it is told all again


@dataclass(slots=True)
class _Scope:
    entries: deque[tuple[int, pb.RememberedResponse]] = field(default_factory=deque)  # by serial number
    workers: set[str] = field(default_factory=set)  # that may draft from it
    size_bytes: int = 0


class FleetHistory:
    """Keeps the latest responses of each prompt and task, within ``most_bytes``; 0 keeps and tells nothing."""

    def __init__(self, buffer: ResponseBuffer, sessions: MemberSessions, most_bytes: int) -> None:
        self._buffer = buffer
        self._sessions = sessions
        self._most_bytes = most_bytes
        self._scopes: OrderedDict[bytes, _Scope] = OrderedDict()
        self._serial = count(1)
        self.size_bytes = 0

    def ended(self, session: WorkerSession, request_ids: Sequence[str]) -> None:
        """Enters responses and turns that a worker has reported to their end, and tells the others that need them."""
        if not self._most_bytes:
            return
        told: dict[str, list[pb.RememberedResponse]] = {}
        for request_id in request_ids:
            response = self._buffer[request_id]
            keys = _scopes_of(response)
            entry = _entry_of(response, keys)
            serial = next(self._serial)
            workers = {name for key in keys for name in self._enter(key, serial, entry)}
            for name in workers - {session.worker_id}:
                told.setdefault(name, []).append(entry)
            session.told.update(dict.fromkeys(keys, serial))  # it sampled this
        self._make_room()
        for name in sorted(told):
            if (other := self._sessions.workers.get(name)) is not None:
                other.send(pb.WorkerCommand(remember=pb.Remember(responses=told[name])))

    def introduce(self, session: WorkerSession, request_id: str) -> None:
        """Sends what a worker lacks of a request that is about to go there."""
        if not self._most_bytes:
            return
        response = self._buffer[request_id]
        if len(session.told) > SCOPES_TOLD_MAX:
            session.told.clear()
        keys, lacking = _scopes_of(response), {}
        for key in keys:
            scope = self._scope(key)
            scope.workers.add(session.worker_id)
            known = session.told.get(key, -1)
            lacking.update({serial: entry for serial, entry in scope.entries if serial > known})
            session.told[key] = max([known, 0, *(serial for serial, _ in scope.entries)])
            if known < 0 and len(keys) > 1:
                lacking.setdefault(0, pb.RememberedResponse(scope=keys[0], task=keys[-1]))
        self._make_room()
        if lacking:
            responses = [lacking[serial] for serial in sorted(lacking)]
            session.send(pb.WorkerCommand(remember=pb.Remember(responses=responses)))

    def _scope(self, key: bytes) -> _Scope:
        """Returns the scope, which is now the latest used. A new one takes the room of an entry."""
        scope = self._scopes.get(key)
        if scope is None:
            scope = self._scopes[key] = _Scope()
            self._count(scope, ENTRY_BYTES)
        self._scopes.move_to_end(key)
        return scope

    def _enter(self, key: bytes, serial: int, entry: pb.RememberedResponse) -> Iterable[str]:
        scope = self._scope(key)
        if len(scope.entries) == RESPONSES_MAX:
            self._count(scope, -_bytes_of(scope.entries.popleft()[1]))
        scope.entries.append((serial, entry))
        self._count(scope, _bytes_of(entry))
        return scope.workers

    def _count(self, scope: _Scope, more_bytes: int) -> None:
        scope.size_bytes += more_bytes
        self.size_bytes += more_bytes

    def _make_room(self) -> None:
        while self.size_bytes > self._most_bytes and self._scopes:
            self.size_bytes -= self._scopes.popitem(last=False)[1].size_bytes


def _scopes_of(response: ResponseState) -> tuple[bytes, ...]:
    prompt = scope_of(response.prompt_ids())
    return (prompt, task_scope_of(response.prompt.task_id)) if response.is_session else (prompt,)


def _entry_of(response: ResponseState, scopes: Sequence[bytes]) -> pb.RememberedResponse:
    """Returns what was sampled last, a response or a turn, with some tokens before it."""
    token_ids, first = response.buffered()["token_id"], response.turn_begin(len(response.inputs))
    sampled = token_ids[first:][-REMEMBERED_TOKENS_MAX:]
    before = token_ids[max(0, first - PROMPT_TOKENS) : first]
    if first < PROMPT_TOKENS:
        before = np.concatenate([np.array(response.prompt_ids()[-(PROMPT_TOKENS - first) :], "<i4"), before])
    whole = np.concatenate([before, sampled]).astype("<i4")
    return pb.RememberedResponse(scope=scopes[0], task=scopes[1] if len(scopes) > 1 else b"", token_ids=whole.tobytes())


def _bytes_of(entry: pb.RememberedResponse) -> int:
    return len(entry.token_ids) + ENTRY_BYTES
