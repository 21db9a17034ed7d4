"""The shell's side of sessions: who attends an environment, and the calls that stream a turn.

A session whose first turn has ended is given to the caller of its environment with the fewest sessions. If that caller
leaves, another gets it at the end of its turn. Without a caller it waits for one. Nothing here outlives the service:
who attends again gets all sessions that wait.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from dora.core.state import IDLE, State
from dora.orchestrator.rollout.prompt_ledger import PromptLedger, PromptState
from dora.orchestrator.rollout.responses.accepted import Accepted
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.orchestrator.rollout.responses.state import ResponseState
from dora.rpc.errors import LimitExceeded

ATTENDEES_MAX: Final = 1024  # of all environments


class Attendee:
    """Holds one open Attend call, with at most as many ids as there are sessions."""

    def __init__(self, environment: str) -> None:
        self.environment = environment
        self.mine: dict[str, None] = {}  # the open sessions that were given to it
        self._unsent: dict[str, None] = {}
        self._changed = asyncio.Event()

    def offer(self, request_id: str) -> None:
        self.mine[request_id] = self._unsent[request_id] = None
        self._changed.set()

    def drop(self, request_id: str) -> None:
        self.mine.pop(request_id, None)
        self._unsent.pop(request_id, None)

    async def next(self) -> str:
        """Returns the session that has waited longest."""
        while not self._unsent:
            self._changed.clear()
            await self._changed.wait()
        request_id = next(iter(self._unsent))
        del self._unsent[request_id]
        return request_id


class Environments:
    """Holds the attendees by environment, and the readers of turns."""

    def __init__(self, buffer: ResponseBuffer, state: State) -> None:
        self._buffer = buffer
        self._state = state
        self._attending: dict[str, list[Attendee]] = {}
        self._unattended: dict[str, Attendee] = {}  # has what waits while nobody attends; none without sessions
        self._attendee_of: dict[str, Attendee] = {}  # by session
        self._readers: dict[str, set[asyncio.Event]] = {}  # by session
        self._readers_of_pieces: dict[str, set[asyncio.Event]] = {}  # those who are woken by each report, too
        self._opened: dict[str, int] = {}  # sessions of each prompt that a client has opened; some may be DONE

    @property
    def attendees(self) -> int:
        """Returns the number of open Attend calls of all environments."""
        return sum(map(len, self._attending.values()))

    def is_idle(self, response: ResponseState) -> bool:
        if response.is_evaluation:
            return self._state.evaluations.is_idle(response.request_id)
        return self._state.request_id.get(response.row) == response.request_id and bool(
            self._state.requests["status"][response.row] == IDLE
        )

    # --------------------------------------------------------------------------------------------------------- events

    def reported(self, accepted: Accepted) -> None:
        """Offers sessions whose turn has ended, and wakes the readers of sessions that have new tokens."""
        for request_id in accepted.ended:
            self.idles(request_id)
            _wake(self._readers, request_id)
        if self._readers_of_pieces:
            for row in accepted.columns.rows.tolist():
                _wake(self._readers_of_pieces, self._buffer.at(row).request_id)

    def idles(self, request_id: str) -> None:
        """Offers a session that waits for its environment."""
        response = self._buffer.get(request_id)
        if response is not None and response.is_session and self.is_idle(response):
            self._offer(response)

    def over(self, request_id: str) -> None:
        """Notes that a session has ended, was replaced or is forgotten."""
        attendee = self._attendee_of.pop(request_id, None)
        if attendee is not None:
            attendee.drop(request_id)
            if not attendee.mine and self._unattended.get(attendee.environment) is attendee:
                del self._unattended[attendee.environment]
        _wake(self._readers, request_id)

    def _offer(self, response: ResponseState) -> None:
        if response.request_id in self._attendee_of:
            return
        environment = response.prompt.environment
        attendees = self._attending.get(environment)
        if attendees:
            attendee = min(attendees, key=lambda each: len(each.mine))
        else:
            attendee = self._unattended.setdefault(environment, Attendee(environment))
        self._attendee_of[response.request_id] = attendee
        attendee.offer(response.request_id)

    def _hand_on(self, left: Attendee) -> None:
        """Offers the waiting sessions of an attendee that has left. The rest is offered when its turns have ended."""
        for request_id in left.mine:
            del self._attendee_of[request_id]
            if (response := self._buffer.get(request_id)) is not None and self.is_idle(response):
                self._offer(response)

    def restored(self) -> None:
        """Offers the waiting sessions of an earlier incarnation."""
        for _, responses in self._buffer.groups():
            for response in responses if responses[0].is_session else ():
                self.idles(response.request_id)

    # ---------------------------------------------------------------------------------------------------------- calls

    @contextmanager
    def attending(self, environment: str) -> Iterator[Attendee]:
        """Adds an attendee until the call ends. Raises LimitExceeded for too many calls."""
        if self.attendees >= ATTENDEES_MAX:
            raise LimitExceeded("environment: calls of Attend", ATTENDEES_MAX + 1, f"at most {ATTENDEES_MAX} at once")
        attendee = Attendee(environment)
        attendees = self._attending.setdefault(environment, [])
        attendees.append(attendee)
        if environment in self._unattended:
            self._hand_on(self._unattended.pop(environment))
        try:
            yield attendee
        finally:
            attendees.remove(attendee)
            if not attendees:
                self._attending.pop(environment, None)
            self._hand_on(attendee)

    def check_room(self, prompt_id: str, sessions: int, ledger: PromptLedger, most: int) -> None:
        """Counts the sessions of a prompt that a client opens. Raises LimitExceeded for more than ``most`` in all."""
        if sum(self._opened.values()) + sessions > most:
            self._opened = {
                name: size for name, size in self._opened.items() if ledger.state(name) is not PromptState.DONE
            }
        opened = sum(self._opened.values())
        if opened + sessions > most:
            allowed = f"at most {most - opened} now (sessions.open_max = {most})"
            raise LimitExceeded("group_size: opened sessions", sessions, allowed)
        self._opened[prompt_id] = sessions

    @contextmanager
    def reading(self, request_id: str, *, whole_turns: bool = False) -> Iterator[asyncio.Event]:
        """Yields an event that is set when the session changes; with ``whole_turns``, not when a turn merely grows."""
        changed = asyncio.Event()
        places = [self._readers] if whole_turns else [self._readers, self._readers_of_pieces]
        for place in places:
            place.setdefault(request_id, set()).add(changed)
        try:
            yield changed
        finally:
            for place in places:
                place[request_id].discard(changed)
                if not place[request_id]:
                    del place[request_id]


def _wake(readers: Mapping[str, Iterable[asyncio.Event]], request_id: str) -> None:
    for reader in readers.get(request_id, ()):
        reader.set()
