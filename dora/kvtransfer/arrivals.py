"""Snapshots that a worker expects, that are arriving, and that have arrived and were not taken yet.

A snapshot is expected under a *ticket*, any text that both ends know, from one epoch of one worker. It travels under a
*key* of its own, so that the remains of an earlier try are never mistaken for it. Unexpected snapshots are refused.

A snapshot of several rounds has a key for each round. Each round names the key of the previous round, so a round of an
earlier try cannot follow in a later one; the key of the last round stands for the whole snapshot. A round that is not
the last is written to the request's destination as soon as it is complete and checked, if there is room.
"""

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np

from dora.errors import Conflict, InvalidValue, NotFound, SnapshotRefused
from dora.kvtransfer.checksum import Checksum, Seal
from dora.kvtransfer.device import OnDevice
from dora.kvtransfer.snapshot import NO_PREFIX, Prefix

PROBE: Final = ""  # the ticket of a probe, which is sent only to be timed
PROBE_BYTES: Final = 4 << 20
EXPECTED_MAX: Final = 1 << 16
ROUNDS_MAX: Final = 4096  # or parts of them: 128K tokens of a large model, in the least memory
_KEY: Final = re.compile(r"([0-9]{1,20})-[0-9a-f]{32}\.kv")


class Ahead(Protocol):
    """The destination of rounds before a snapshot's last one. Called by one thread at a time, not always the same."""

    @property
    def has_blocks(self) -> bool:
        """Returns whether the engine has reserved blocks for it. Without, KV waits in host memory."""

    def start(self, key: str, prefix: Prefix) -> None:
        """Begins a snapshot with a first round of this key, in place of any other.

        Raises SnapshotRefused if the prefix that it follows is not here.
        """

    def begin(self, head: bytes) -> object:
        """Prepares for the request that the head of a first round describes, including the layout of its KV.

        Returns the decoded head, which is opaque here. Raises SnapshotRefused for a request that cannot be served.
        """

    def write(self, first_bytes: int, body: np.ndarray | OnDevice) -> bool:
        """Writes a round that follows ``first_bytes`` bytes of earlier rounds.

        Returns False if there is no room for it, or if its layout differs.
        """


@dataclass(slots=True, eq=False)
class _Expected:
    most_bytes: int
    ahead: Ahead | None
    writing: threading.Lock = field(default_factory=threading.Lock)


@dataclass(slots=True, eq=False)
class Arrival:
    """One round of a snapshot that is arriving; if ``goes_on``, another round follows."""

    key: str
    ticket: str
    epoch: int  # of the sending worker
    body: np.ndarray | OnDevice
    before: "Arrival | None" = None  # the previous round
    goes_on: bool = False
    filled_bytes: int = 0
    checksum: Checksum = "xxh3"
    chunk_bytes: int = 0  # of its largest chunk
    sums: list[bytes] = field(default_factory=list)
    head: bytes = b""
    opening: object = None  # the decoded head of a first round
    is_whole: bool = False  # complete and checked
    prefix: Prefix = NO_PREFIX  # blocks before the first round that are already here
    ahead_bytes: int = 0  # size of a round that was written ahead; ``body`` is then empty

    @property
    def size_bytes(self) -> int:
        return self.body.nbytes + self.ahead_bytes

    def leads_to(self, ticket: str, epoch: int) -> bool:
        """Returns whether a further round of this ticket and epoch may follow."""
        return (self.ticket, self.epoch) == (ticket, epoch) and self.is_whole and self.goes_on

    @property
    def seal(self) -> Seal:
        return Seal(self.checksum, self.chunk_bytes, tuple(self.sums))

    def rounds(self) -> "list[Arrival]":
        found = [self]
        while found[-1].before is not None:
            found.append(found[-1].before)
        return found[::-1]


def check_key(key: str, epoch: int) -> None:
    """Raises InvalidValue for a key that this epoch of a worker cannot have made."""
    found = _KEY.fullmatch(key)
    if found is None or found[1] != str(epoch):
        raise InvalidValue("locator", key, f"{epoch}, a dash, 32 hexadecimal digits and .kv")


class Arrivals:
    """Thread-safe. Dropped snapshots free their memory at once, or after the chunk that is being read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._expected: dict[tuple[int, str], _Expected] = {}
        self._here: dict[str, Arrival] = {}

    def expect(self, ticket: str, epoch: int, most_bytes: int, ahead: Ahead | None = None) -> None:
        """Expects one snapshot of this ticket from this epoch of a worker. Raises Conflict if too many are expected.

        ``ahead`` is the destination of all rounds but the last; without it they are stored here.
        """
        with self._lock:
            if len(self._expected) >= EXPECTED_MAX:
                raise Conflict(
                    "snapshots expected", len(self._expected), f"below {EXPECTED_MAX}", why="leaves no room for another"
                )
            self._expected[epoch, ticket] = _Expected(most_bytes, ahead)

    def forget(self, ticket: str) -> None:
        """Stops expecting the ticket, and drops its rounds."""
        with self._lock:
            for entry in [entry for entry in self._expected if entry[1] == ticket]:
                del self._expected[entry]
            self._drop(lambda arrival: arrival.ticket == ticket)

    def take(self, key: str) -> tuple[bytes, list[Arrival]]:
        """Removes and returns head and rounds of an arrived snapshot; the first rounds may have been written ahead.

        The head is the concatenation of all rounds' heads. Raises NotFound if it has not arrived or was taken.
        """
        with self._lock:
            arrival = self._here.get(key)
            if arrival is None or not arrival.is_whole or arrival.goes_on:
                raise NotFound("locator", key, "a snapshot that has arrived and was not taken")
            rounds = arrival.rounds()
            for each in rounds:
                del self._here[each.key]
            self._expected.pop((arrival.epoch, arrival.ticket), None)
        return b"".join(each.head for each in rounds), rounds

    def close(self) -> None:
        with self._lock:
            self._expected.clear()
            self._here.clear()

    # Called by the connection that a snapshot arrives on.

    def check_opening(self, ticket: str, epoch: int, key: str, body_bytes: int, after: str = "") -> Arrival | None:
        """Returns the round before this one, whose key is ``after``, or None for a first round.

        Raises SnapshotRefused if the round is not expected, is too large, or follows a round that is not here.
        """
        try:
            check_key(key, epoch)
        except InvalidValue as error:
            raise SnapshotRefused(str(error), error.field, error.value) from error
        with self._lock:
            expected = _Expected(PROBE_BYTES, None) if ticket == PROBE else self._expected.get((epoch, ticket))
            if expected is None:
                raise SnapshotRefused(f"ticket {ticket!r} of epoch {epoch}: it is not expected here", "ticket", ticket)
            before = self._here.get(after)
            if after and (before is None or not before.leads_to(ticket, epoch)):
                raise SnapshotRefused(f"round after {after!r}: this snapshot has no such round here", "round", after)
            rounds = [] if before is None else before.rounds()
            whole_bytes = body_bytes + sum(each.size_bytes for each in rounds)
            most_bytes = expected.most_bytes
            if not (body_bytes > 0 and whole_bytes <= most_bytes and len(rounds) < ROUNDS_MAX):
                raise SnapshotRefused(
                    f"body bytes = {whole_bytes} in {len(rounds) + 1} rounds: at most {most_bytes} are expected "
                    f"in {ROUNDS_MAX}",
                    "body bytes",
                    whole_bytes,
                )
            if key in self._here:
                raise SnapshotRefused(f"key {key}: it is already in use", "key", key)
        return before

    def may_land(self, ticket: str, epoch: int) -> bool:
        """Returns whether a body may lie in a device's memory: it leaves that soon, for blocks of the engine."""
        with self._lock:
            expected = self._expected.get((epoch, ticket))
        return expected is None or expected.ahead is None or expected.ahead.has_blocks

    def begin(self, arrival: Arrival) -> None:
        """Registers a round. Drops other rounds of the same ticket, except those that it follows.

        Raises SnapshotRefused if the snapshot is not expected, or if its prefix is not here.
        """
        rounds = {each.key for each in arrival.rounds()[:-1]}
        with self._lock:
            expected = self._expected.get((arrival.epoch, arrival.ticket))
            if not (expected or arrival.ticket == PROBE) or not rounds <= self._here.keys():
                raise SnapshotRefused(f"ticket {arrival.ticket!r}: it is no longer expected", "ticket", arrival.ticket)
            of_it = (arrival.ticket, arrival.epoch)
            self._drop(lambda other: (other.ticket, other.epoch) == of_it and other.key not in rounds)
            self._here[arrival.key] = arrival
        if not rounds:
            self._start(arrival, expected)

    def _start(self, arrival: Arrival, expected: _Expected | None) -> None:
        prefix = arrival.prefix
        if prefix.blocks:
            try:
                check_key(prefix.key, arrival.epoch)
            except InvalidValue as error:
                raise SnapshotRefused(str(error), error.field, error.value) from error
            if expected is None or expected.ahead is None or not arrival.goes_on:
                raise SnapshotRefused(
                    f"prefix of {prefix.blocks} blocks: it is not stored here", "prefix", prefix.blocks
                )
        if expected is not None and expected.ahead is not None:
            with expected.writing:
                expected.ahead.start(arrival.key, prefix)

    def find(self, key: str) -> Arrival | None:
        with self._lock:
            return self._here.get(key)

    def complete(self, arrival: Arrival, head: bytes) -> bool:
        """Marks a round as complete, and writes it ahead if possible. Returns False if it was dropped meanwhile.

        Raises SnapshotRefused for the head of a request that cannot be accepted.
        """
        self._write_ahead(arrival, head)
        with self._lock:
            if self._here.get(arrival.key) is not arrival:
                return False
            if arrival.ticket == PROBE:
                del self._here[arrival.key]
            arrival.body.setflags(write=False)
            arrival.head, arrival.is_whole = head, True
            return True

    def _write_ahead(self, arrival: Arrival, head: bytes) -> None:
        """Writes a round whole, and only if no later try has dropped it, so rounds of several tries never mix."""
        with self._lock:
            expected = self._expected.get((arrival.epoch, arrival.ticket))
        before = arrival.rounds()[:-1]
        if expected is None or expected.ahead is None or not arrival.goes_on:
            return
        with expected.writing:
            if self.find(arrival.key) is not arrival:
                return
            if head and not before:
                arrival.opening = expected.ahead.begin(head)
            if not all(each.ahead_bytes for each in before):
                return
            if expected.ahead.write(sum(each.ahead_bytes for each in before), arrival.body):
                arrival.ahead_bytes, arrival.body = arrival.body.nbytes, np.empty(0, np.uint8)

    def drop(self, key: str) -> None:
        with self._lock:
            self._drop(lambda arrival: arrival.key == key)

    def arriving(self, epoch: int) -> list[str]:
        """Keys of rounds that have begun and are not complete."""
        with self._lock:
            return [key for key, arrival in self._here.items() if arrival.epoch == epoch and not arrival.is_whole]

    def _drop(self, condition: Callable[[Arrival], bool]) -> None:
        for key in [key for key, arrival in self._here.items() if condition(arrival)]:
            del self._here[key]
