"""Keeps room among a service's connections for peers that prove a token.

gRPC closes new connections once there are as many as the service takes, whoever holds them, and its Python API shows
none of them. So a thread looks through the process's own sockets: connections of peers that have proved nothing may
take half of the places that the others leave. Of more than that, the oldest connection of the address that has most is
ended, again and again; one that has asked for no challenge goes first. The other half is for those who come between two
looks. A connection that makes call after call without a proof is ended too, with its calls that wait. Works where the
system lists a process's files (Linux, macOS); elsewhere gRPC's limits alone hold.
"""

import os
import socket
import stat
import threading
import time
from collections import defaultdict, deque
from contextlib import suppress
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import count
from pathlib import Path
from typing import Final
from urllib.parse import unquote

CALM_S: Final = 0.25  # between two counts of files
LEAST_S: Final = 0.02  # between two looks at all of them, while there are many
CALLS_MAX: Final = 32  # challenges and refused calls of a connection that has proved nothing
SHARE: Final = 4  # a look takes at most one part of so many of a core's time
FOLDERS: Final = ("/proc/self/fd", "/dev/fd")

Peer = tuple[str, int]


@dataclass(slots=True)
class _Socket:
    number: int  # counts up
    inode: int
    peer: Peer | None = None  # None: it is none of the service's connections
    is_ended: bool = False


class Room:
    """Keeps room. ``open`` it once the service listens, ``close`` it at its end. ``proven`` is thread-safe."""

    def __init__(self, most: int) -> None:
        """``most`` is the service's limit of connections."""
        self._most = most
        self._port = 0
        self._proven: dict[Peer, float] = {}  # when the peer last proved its token
        self._challenged: dict[Peer, float] = {}  # when it last was answered a challenge
        self._calls: dict[Peer, int] = {}  # of a peer that has proved nothing
        self._sockets: dict[int, _Socket] = {}  # by descriptor, as of the last look
        self._is_noisy = False  # a connection has made too many calls, or calls are noted of too many
        self._numbers = count()
        self._looked_s = 0.0  # when that began
        self._folder = next((folder for folder in FOLDERS if Path(folder).is_dir()), "")
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="room", daemon=True)

    def open(self, port: int) -> None:
        """Begins to keep room among the connections to this port."""
        self._port = port
        if self._folder:
            self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def proven(self, peer: str) -> None:
        """Notes that a call of this peer, as gRPC names it, has proved a token."""
        if (noted := self._note(self._proven, peer)) is not None:
            self._calls.pop(noted, None)

    def challenged(self, peer: str) -> None:
        """Notes that this peer was answered a challenge. Silent connections of its address are ended before it."""
        self._count(self._note(self._challenged, peer))

    def refused(self, peer: str) -> None:
        """Notes that a call of this peer had no valid proof."""
        self._count(_parsed(peer))

    def _note(self, noted: dict[Peer, float], peer: str) -> Peer | None:
        if (found := _parsed(peer)) is not None:
            noted[found] = time.monotonic()
        return found

    def _count(self, peer: Peer | None) -> None:
        if peer is not None and peer not in self._proven:
            self._calls[peer] = self._calls.get(peer, 0) + 1
            self._is_noisy = self._is_noisy or self._calls[peer] > CALLS_MAX or len(self._calls) > self._most

    def _watch(self) -> None:
        others = 0  # files that are not of unproven connections, as of the last look
        pause_s = CALM_S
        while not self._stopping.wait(pause_s):
            pause_s = CALM_S
            is_noisy, self._is_noisy = self._is_noisy, False
            if is_noisy or len(os.listdir(self._folder)) - others > self._unproven_most() // 2:
                began_s = time.monotonic()
                unproven = self.look()
                others = len(self._sockets) - len(unproven)
                if len(unproven) > self._unproven_most() // 2:
                    pause_s = min(CALM_S, max(LEAST_S, (SHARE - 1) * (time.monotonic() - began_s)))

    def _unproven_most(self) -> int:
        return max(1, (self._most - len(self._proven)) // 2)

    def look(self) -> list[int]:
        """Notes who is connected, and ends connections. Returns the descriptors of unproven ones that stay."""
        began_s, found = time.monotonic(), dict[int, _Socket]()
        for name in os.listdir(self._folder):
            if (descriptor := int(name)) in found:
                continue
            try:
                about = os.fstat(descriptor)
            except OSError:  # closed meanwhile
                continue
            known = self._sockets.get(descriptor)
            if known is None or known.inode != about.st_ino:
                known = _Socket(
                    next(self._numbers), about.st_ino, self._peer(descriptor) if stat.S_ISSOCK(about.st_mode) else None
                )
                for noted in (self._proven, self._challenged):
                    if known.peer is not None and noted.get(known.peer, began_s) < self._looked_s:
                        del noted[known.peer]  # by an earlier connection from the same port
            found[descriptor] = known
        present = {each.peer for each in found.values()}
        for noted in (self._proven, self._challenged):
            for peer, noted_s in dict(noted).items():
                if peer not in present and noted_s < began_s:
                    noted.pop(peer, None)
        for gone in [peer for peer in list(self._calls) if peer not in present]:
            self._calls.pop(gone, None)
        self._sockets, self._looked_s = found, began_s
        for descriptor, each in found.items():
            if each.peer is not None and self._is_unproven(each) and self._calls.get(each.peer, 0) > CALLS_MAX:
                self._end(descriptor)
        return self._keep([fd for fd, each in found.items() if self._is_unproven(each)])

    def _is_unproven(self, each: _Socket) -> bool:
        return each.peer is not None and not each.is_ended and each.peer not in self._proven

    def _keep(self, unproven: list[int]) -> list[int]:
        by_host: dict[str, deque[int]] = defaultdict(deque)
        for descriptor in sorted(unproven, key=self._rank):
            peer = self._sockets[descriptor].peer
            by_host[peer[0] if peer else ""].append(descriptor)
        most_first = [(-len(each), self._rank(each[0]), host) for host, each in by_host.items()]
        heapify(most_first)
        for _ in range(len(unproven) - self._unproven_most()):
            held, _, host = most_first[0]
            self._end(by_host[host].popleft())
            if held < -1:
                heapreplace(most_first, (held + 1, self._rank(by_host[host][0]), host))
            else:
                heappop(most_first)
        return [descriptor for each in by_host.values() for descriptor in each]

    def _rank(self, descriptor: int) -> tuple[bool, int]:
        each = self._sockets[descriptor]
        return each.peer in self._challenged, each.number

    def _end(self, descriptor: int) -> None:
        """Shuts a connection down, which gRPC then closes. A copy holds the socket that is checked."""
        each = self._sockets[descriptor]
        each.is_ended = True
        with suppress(OSError):  # it was closed meanwhile
            copy = os.dup(descriptor)
            try:
                if os.fstat(copy).st_ino == each.inode:
                    with socket.socket(fileno=os.dup(copy)) as held:
                        held.shutdown(socket.SHUT_RDWR)
            finally:
                os.close(copy)

    def _peer(self, descriptor: int) -> Peer | None:
        try:
            with socket.socket(fileno=os.dup(descriptor)) as held:
                if held.family not in (socket.AF_INET, socket.AF_INET6) or held.getsockname()[1] != self._port:
                    return None
                host, port = held.getpeername()[:2]
        except OSError:  # closed meanwhile; or it listens
            return None
        return _plain(host), port


def _parsed(peer: str) -> Peer | None:
    scheme, _, address = unquote(peer).partition(":")
    host, _, port = address.rpartition(":")
    return (_plain(host.strip("[]")), int(port)) if scheme in ("ipv4", "ipv6") and port.isdecimal() else None


def host_of_peer(peer: str) -> str:
    """Returns the address in gRPC's name of a peer, or an empty text."""
    found = _parsed(peer)
    return found[0] if found is not None else ""


def _plain(host: str) -> str:
    """Removes the mark of an IPv4 address within an IPv6 one."""
    return host.removeprefix("::ffff:")
