"""A connected socket under TLS, for one thread that sends and one that receives.

OpenSSL's connections are not made for two threads at once. So the socket never blocks, each call of OpenSSL is under a
lock, and a thread waits for the network outside it. OpenSSL takes and gives one record at a time.
"""

import errno
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
SENDING_SHARE: Final = 0.25  # of the timeout: a call that has sent for so long returns


class SecureSocket:
    """Has the methods of a socket that ``dora.kvtransfer.wire.Stream`` uses."""

    def __init__(self, connected: socket.socket, contexts: Contexts, timeout_s: float, *, server: bool) -> None:
        """Takes over the socket. ``shake_hands`` must follow."""
        self._contexts = contexts
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._ahead = b""  # received to find out that something has come
        connected.setblocking(False)
        context = contexts.context(server=server)
        self._tls = context.wrap_socket(connected, server_side=server, do_handshake_on_connect=False)
        self.family = self._tls.family
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(self._tls, select.POLLIN)
        self._writable.register(self._tls, select.POLLOUT)

    def shake_hands(self) -> None:
        """Raises TransferFailed if the other end is none of the run's."""
        try:
            self._shake_hands(time.monotonic() + self._timeout_s)
            self._contexts.check_peer(self._tls.getpeercert(binary_form=True))
        except (OSError, ValueError) as error:
            said = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else str(error)
            raise TransferFailed(f"no TLS connection came about: {said}") from error

    def sendmsg(self, parts: Sequence[memoryview]) -> int:
        """Sends some or all of ``parts``, as a socket does. Raises BlockingIOError if nothing goes for the timeout."""
        began_s = time.monotonic()
        sent = 0
        for record in _records(parts):
            self._write(record)
            sent += len(record)
            if time.monotonic() - began_s > SENDING_SHARE * self._timeout_s:
                break
        return sent

    def recv_into(self, target: memoryview, count: int = 0, flags: int = 0) -> int:
        """Fills ``target``; with less if the other end closes, or is silent for the timeout after some bytes."""
        taken = min(len(self._ahead), target.nbytes)
        target[:taken], self._ahead = self._ahead[:taken], self._ahead[taken:]
        ends_s = time.monotonic() + self._timeout_s
        while taken < target.nbytes:
            try:
                with self._lock:
                    come = self._tls.recv_into(target[taken:])
            except ssl.SSLWantReadError:
                if not self._wait(self._readable, ends_s):
                    break
                continue
            if not come:
                return taken
            taken += come
        if not taken:
            raise BlockingIOError(errno.EAGAIN, "nothing came")
        return taken

    def is_readable(self, wait_s: float) -> bool:
        """Returns whether content, or the end, comes within the time. TLS's own messages do not count."""
        ends_s = time.monotonic() + wait_s
        while not self._ahead:
            try:
                with self._lock:
                    self._ahead = self._tls.recv(RECORD_BYTES)
                if not self._ahead:
                    return True
            except ssl.SSLWantReadError:
                if not self._wait(self._readable, ends_s):
                    return False
        return True

    def setsockopt(self, *option: Any) -> None:
        self._tls.setsockopt(*option)

    def getsockname(self) -> Any:
        return self._tls.getsockname()

    def shutdown(self, how: int) -> None:
        """Ends the connection for threads that wait. Not as ssl does, which would continue in the clear."""
        socket.socket.shutdown(self._tls, how)

    def close(self) -> None:
        self._tls.close()

    def _shake_hands(self, ends_s: float) -> None:
        while True:
            try:
                return self._tls.do_handshake()
            except ssl.SSLWantReadError:
                waiting = self._readable
            except ssl.SSLWantWriteError:
                waiting = self._writable
            if not self._wait(waiting, ends_s):
                raise BlockingIOError(errno.EAGAIN, f"the other end is silent for {self._timeout_s:g} s")

    def _write(self, record: memoryview) -> None:
        ends_s = time.monotonic() + self._timeout_s
        while True:
            try:
                with self._lock:
                    self._tls.send(record)
                return
            except ssl.SSLWantWriteError:
                if not self._wait(self._writable, ends_s):
                    raise BlockingIOError(errno.EAGAIN, "nothing goes") from None

    @staticmethod
    def _wait(poll: select.poll, ends_s: float) -> bool:
        return bool(poll.poll(max(0.0, ends_s - time.monotonic()) * 1000))


def _records(parts: Sequence[memoryview]) -> Iterator[memoryview]:
    """Yields the content of records: pieces of large parts, and small parts together."""
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
