"""Retries: a request that comes again gets the turns of its first call."""

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from dora.agents.front.callers import Call
from dora.agents.front.turns import RunningTurn
from dora.errors import Conflict

REPLAYS_S: Final = 600.0
REPLAYS_MAX: Final = 4096  # requests; the oldest is forgotten first

T = TypeVar("T")


class Shared(Generic[T]):
    """Work that several requests wait for. It is cancelled when the last of them has left."""

    def __init__(self, task: asyncio.Task[T]) -> None:
        self.task = task
        self.task.add_done_callback(lambda task: task.cancelled() or task.exception())  # its waiters may have left
        self.is_left = False
        self._waiting = 0

    async def result(self) -> T:
        """Waits for the end. Raises what the work raises."""
        self._waiting += 1
        try:
            return await asyncio.shield(self.task)
        finally:
            self._waiting -= 1
            if not self._waiting and not self.task.done():
                self.is_left = True
                self.task.cancel()

    async def gone(self) -> None:
        """Waits for the end of work that was cancelled."""
        await asyncio.wait({self.task})


@dataclass(frozen=True, slots=True)
class Named:
    """The identity of a request. ``key`` is its client's, empty if it gave none. ``is_retry`` if its client says so."""

    call: Call
    route: str
    digest: str  # of its body
    key: str = ""
    is_retry: bool = False

    @property
    def name(self) -> str:
        """The name that a request and its retries share: by its key, or else by its content."""
        parts = (self.call.holder, self.call.session_id, self.route, bool(self.key), self.key or self.digest)
        return hashlib.sha256(repr(parts).encode()).hexdigest()


@dataclass(slots=True, eq=False)
class Kept:
    """A request and its turns. ``readers`` read its reply. It ``is_left`` if its client has gone before the end."""

    received: Named
    request_id: str  # its client's name for it
    at_s: float
    begun: Shared[list[RunningTurn]]
    readers: int = 1
    is_left: bool = False

    @property
    def turns(self) -> Sequence[RunningTurn]:
        return self.begun.task.result() if self.begun.task.done() and not self._has_failed else ()

    @property
    def _has_failed(self) -> bool:
        task = self.begun.task
        return self.begun.is_left or (task.done() and (task.cancelled() or task.exception() is not None))

    @property
    def is_of_use(self) -> bool:
        return not self._has_failed and not any(turn.error is not None for turn in self.turns)


class Replays:
    """The latest requests, by caller and content."""

    def __init__(self) -> None:
        self._replays: dict[Kept, None] = {}  # the oldest first
        self._named: dict[str, list[Kept]] = {}

    def find(self, received: Named, now_s: float) -> Kept | None:
        """Returns the first call of a request, and notes another reader of it. Returns None if there was none.

        A request with a key is the one with that key. Without one, equal requests may be of several agents, so a
        repetition gets the turns of a call whose client has gone, and no other does. Within a session it may also say
        that it is a retry. Raises Conflict for a key that another request has.
        """
        while self._replays and (
            len(self._replays) > REPLAYS_MAX or next(iter(self._replays)).at_s < now_s - REPLAYS_S
        ):
            self.forget(next(iter(self._replays)))
        known = [replay for replay in self._named.get(received.name, ()) if replay.is_of_use]
        left = [replay for replay in known if replay.is_left]
        found = (left or known if received.key or (received.is_retry and received.call.session_id) else left)[:1]
        for replay in found:
            if replay.received.digest != received.digest:
                why = "has been used for another request"
                raise Conflict("Idempotency-Key", received.key, "another key for each request", why)
            replay.is_left, replay.readers = False, replay.readers + 1
            return replay
        return None

    def keep(self, replay: Kept) -> None:
        self._replays[replay] = None
        self._named.setdefault(replay.received.name, []).append(replay)

    def ended(self, replay: Kept, *, delivered: bool) -> None:
        """Notes the end of one reading of a reply, and whether its client has got it whole."""
        replay.readers -= 1
        replay.is_left = not (delivered or replay.readers)

    def forget(self, replay: Kept) -> None:
        """Forgets a request. Its retries are requests of their own."""
        if self._replays.pop(replay, self) is None:
            self._named[replay.received.name].remove(replay)
            if not self._named[replay.received.name]:
                del self._named[replay.received.name]

    def called(self, call: Call, request_id: str) -> Sequence[RunningTurn]:
        """Returns the turns of a caller's requests with this client's name, within its session, if it has one."""
        own = [
            replay
            for replay in self._replays
            if (replay.received.call.session_id, replay.request_id) == (call.session_id, request_id)
        ]
        return [turn for replay in own if replay.received.call.holder == call.holder for turn in replay.turns]
