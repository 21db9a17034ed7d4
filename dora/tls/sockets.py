"""A connected socket under TLS, for one thread that sends and one that receives.

OpenSSL's connections are not made for two threads at once, and take one record at a time. So OpenSSL works in memory,
under a lock, on many records together; the network's calls are made outside the lock.
"""

import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from dora.errors import TransferFailed
from dora.tls.contexts import Contexts

RECORD_BYTES: Final = 16 << 10  # of content, at most
TOGETHER: Final = 64  # records that are encrypted before they are sent
RECEIVED_BYTES: Final = 512 << 10  # of one call, at most


class SecureSocket:
    """The methods of a socket that ``dora.kvtransfer.wire.Stream`` uses. It blocks, with timeouts of its own."""

    def __init__(self, connected: socket.socket, contexts: Contexts, timeout_s: float, *, server: bool) -> None:
        """Prepares the socket. ``shake_hands`` must follow."""
        self._socket = connected
        self._contexts = contexts
        self._timeout_s = timeout_s
        self._lock = threading.Lock()  # of what OpenSSL has
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = contexts.context(server=server)
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server)
        self._received = memoryview(bytearray(RECEIVED_BYTES))
        self._ahead = b""  # content that was received to find out that some has come
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)
        self.family = connected.family

    def shake_hands(self) -> None:
        """Shakes hands. Raises TransferFailed if the other end is none of the run's."""
        ends_s = time.monotonic() + self._timeout_s
        try:
            while True:
                try:
                    self._tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    self._flush()
                    if time.monotonic() > ends_s or not self._receive():
                        raise ConnectionError("the other end ends, or is too slow") from None
                except ssl.SSLError:
                    self._flush()  # tells it why
                    raise
            self._flush()
            self._contexts.check_peer(self._tls.getpeercert(binary_form=True))
        except (OSError, ValueError) as error:
            said = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else str(error)
            raise TransferFailed(f"no TLS connection came about: {said}") from error

    def sendmsg(self, parts: Sequence[memoryview]) -> int:
        """Sends as many records of ``parts`` as are encrypted together; returns the bytes of content."""
        sent = 0
        with self._lock:
            for number, record in enumerate(_records(parts), start=1):
                sent += self._tls.write(record)
                if number == TOGETHER:
                    break
        self._flush()
        return sent

    def recv_into(self, target: memoryview, count: int = 0, flags: int = 0) -> int:
        """Fills ``target``, with less if the other end closes, or takes longer than the timeout."""
        taken = min(len(self._ahead), target.nbytes)
        target[:taken], self._ahead = self._ahead[:taken], self._ahead[taken:]
        ends_s = time.monotonic() + self._timeout_s
        while True:
            try:
                with self._lock:
                    while taken < target.nbytes:
                        come = self._tls.read(target.nbytes - taken, target[taken:])
                        if not come:
                            return taken
                        taken += int(come)
                return taken
            except ssl.SSLWantReadError:
                if taken and time.monotonic() > ends_s:
                    return taken
            except ssl.SSLEOFError:
                return taken
            if not self._receive():
                return taken

    def is_readable(self, wait_s: float) -> bool:
        """Returns whether content, or the end, comes within the time. TLS's own messages do not count."""
        ends_s = time.monotonic() + wait_s
        while not self._ahead:
            try:
                with self._lock:
                    self._ahead = self._tls.read(RECORD_BYTES)
                if not self._ahead:
                    return True
            except ssl.SSLWantReadError:
                if not self._poll.poll(max(0.0, ends_s - time.monotonic()) * 1000):
                    return False
                if not self._receive():
                    return True
            except ssl.SSLEOFError:
                return True
        return True

    def setsockopt(self, *option: Any) -> None:
        self._socket.setsockopt(*option)

    def getsockname(self) -> Any:
        return self._socket.getsockname()

    def shutdown(self, how: int) -> None:
        self._socket.shutdown(how)

    def close(self) -> None:
        self._socket.close()

    def _flush(self) -> None:
        """Sends what is encrypted. Only the thread that sends calls it, so records stay in order."""
        with self._lock:
            waiting = memoryview(self._outgoing.read())
        while waiting:
            waiting = waiting[self._socket.send(waiting) :]

    def _receive(self) -> int:
        came = self._socket.recv_into(self._received)
        with self._lock:
            if came:
                self._incoming.write(self._received[:came])
            else:
                self._incoming.write_eof()
        return came


def _records(parts: Sequence[memoryview]) -> Iterator[memoryview]:
    joined = bytearray()
    for part in parts:
        content = part.cast("B") if part.format != "B" or part.ndim != 1 else part
        if len(joined) + len(content) <= RECORD_BYTES:
            joined += content
            continue
        if joined:
            yield memoryview(bytes(joined))
            joined.clear()
        for at in range(0, len(content), RECORD_BYTES):
            yield content[at : at + RECORD_BYTES]
    if joined:
        yield memoryview(bytes(joined))
