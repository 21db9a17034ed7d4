"""Somebody in the middle of a pair's stream, who changes what passes: one frame of one direction, as a plan says."""

import socket
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgpack

from dora.kvtransfer.wire import PREAMBLE, TAG_BYTES, Kind

Way = Literal["there", "back"]  # from the sending half, to it
TICK_S: Final = 0.02
REMEMBERED: Final = 4  # earlier frames of each kind


@dataclass(frozen=True)
class Passing:
    """One frame as it passes."""

    kind: Kind
    raw: bytes
    head_bytes: int

    @property
    def head_at(self) -> int:
        return PREAMBLE.size + TAG_BYTES

    @property
    def body_at(self) -> int:
        return self.head_at + self.head_bytes

    @property
    def head(self) -> dict[str, Any]:
        return dict(msgpack.unpackb(self.raw[self.head_at : self.body_at]))


# What passes in a frame's place. ``earlier``: frames of the kind that have passed before.
Change = Callable[[Passing, list[Passing]], list[bytes]]


@dataclass
class Plan:
    """Changes the frame of this kind and way that comes after ``skip`` others of it."""

    way: Way
    kind: Kind
    change: Change
    skip: int = 0
    ends: bool = False  # the connection, after it
    swaps: bool = False  # what it gives passes after the next frame
    done: bool = False
    by: object = None  # the connection of which a frame was changed
    strays: bool = False  # what arrived came by another one: the frame was of an earlier handoff that had failed
    held: list[bytes] = field(default_factory=list)


class Middle:
    """Others reach a worker's door by ``address``. A connection whose frames were changed ends once nothing passes."""

    def __init__(self, listener: str, sees: Callable[[Passing], None] = lambda _frame: None) -> None:
        """``sees``: is shown each frame from the sending half."""
        self._listener = listener
        self._sees = sees
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self._plan: Plan | None = None
        self._earlier: dict[tuple[Way, Kind], deque[Passing]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._lock = threading.Lock()
        self._relays: set[_Relay] = set()
        self._listening = threading.Thread(target=self._listen, name="middle", daemon=True)
        self._listening.start()

    def plan(self, plan: Plan | None) -> None:
        with self._lock:
            self._plan = plan

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._listening.join()
        self._socket.close()
        for relay in list(self._relays):
            relay.close()

    def passes(self, way: Way, frame: Passing, relay: object) -> tuple[list[bytes], bool, bool]:
        """Returns the replacement of a message, whether it is a change, and whether the connection ends then."""
        with self._lock:
            if way == "there":
                self._sees(frame)
            plan, earlier = self._plan, self._earlier[way, frame.kind]
            before = list(earlier)
            earlier.append(frame)
            if plan is not None and frame.kind is Kind.ARRIVED:
                plan.strays = plan.done and relay is not plan.by
            if plan is None or way != plan.way:
                return [frame.raw], False, False
            if plan.held and relay is plan.by:
                held, plan.held = plan.held, []
                return [frame.raw, *held], True, plan.ends
            if plan.done or frame.kind is not plan.kind:
                return [frame.raw], False, False
            if plan.skip:
                plan.skip -= 1
                return [frame.raw], False, False
            plan.done, plan.by = True, relay
            given = plan.change(frame, before)
            if plan.swaps:
                plan.held, given = given, []
            return given, True, plan.ends

    def _listen(self) -> None:
        while True:
            try:
                connected, _ = self._socket.accept()
            except OSError:
                return
            self._relays = {relay for relay in self._relays if relay.is_alive()}
            self._relays.add(_Relay(self, connected, self._listener))


class _Relay:
    """One connection: a thread for each way."""

    def __init__(self, middle: Middle, near: socket.socket, listener: str) -> None:
        host, _, port = listener.rpartition(":")
        self._middle = middle
        self._sockets = (near, socket.create_connection((host, int(port))))
        self._is_changed = False
        self._open_ways = 2
        self._lock = threading.Lock()
        for each in self._sockets:
            each.settimeout(TICK_S)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ways: tuple[Way, Way] = ("there", "back")
        self._threads = [
            threading.Thread(target=self._run, args=(way, *ends), name="middle", daemon=True)
            for way, ends in zip(ways, (self._sockets, self._sockets[::-1]), strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def is_alive(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        self._stop()
        for thread in self._threads:
            thread.join()

    def _run(self, way: Way, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError, EOFError):
            while True:
                given, changed, ends = self._middle.passes(way, self._receive(source), self)
                self._is_changed = self._is_changed or changed
                for raw in given:
                    _send(target, raw)
                if ends:
                    break
        self._stop()
        with self._lock:
            self._open_ways -= 1
            if not self._open_ways:
                for each in self._sockets:
                    each.close()

    def _receive(self, source: socket.socket) -> Passing:
        preamble = self._read(source, PREAMBLE.size)
        _, kind, _, head_bytes, body_bytes = PREAMBLE.unpack(preamble)
        rest = self._read(source, TAG_BYTES + head_bytes + body_bytes)
        return Passing(Kind(kind), preamble + rest, head_bytes)

    def _read(self, source: socket.socket, count: int) -> bytes:
        buffer = bytearray()
        while len(buffer) < count:
            try:
                piece = source.recv(count - len(buffer))
            except TimeoutError:
                if self._is_changed:
                    raise EOFError from None
                continue
            if not piece:
                raise EOFError
            buffer += piece
        return bytes(buffer)

    def _stop(self) -> None:
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def _send(target: socket.socket, raw: bytes) -> None:
    shown = memoryview(raw)
    while shown:
        with suppress(TimeoutError):
            shown = shown[target.send(shown) :]
