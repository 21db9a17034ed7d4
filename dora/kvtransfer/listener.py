"""The listener of a worker, which other workers connect to.

One thread accepts connections. Each connection has a thread of its own, which receives and checks bytes.
"""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from typing import Final

from dora.errors import InvalidValue, TransferFailed
from dora.kvtransfer.wire import Stream
from dora.tls.contexts import Contexts

log = logging.getLogger("dora.kv")

TICK_S: Final = 0.25  # how soon a thread notices that it must end
CONNECTIONS_MAX: Final = 4096


class Listener:
    """A listening socket, bound at creation so that its address is known; ``open`` accepts connections."""

    def __init__(self, host: str, port: int = 0) -> None:
        try:
            self._socket = socket.create_server((host, port), family=_family(host))
        except OSError as error:
            raise InvalidValue("kv address", f"{host}:{port}", f"an address of this host ({error.strerror})") from error
        self.address = _shown(host, self._socket.getsockname()[1])
        self._stopping = threading.Event()
        self._tls: Contexts | None = None
        self._threads: dict[threading.Thread, Stream] = {}
        self._listening: threading.Thread | None = None

    def open(
        self, serve: Callable[[Stream, threading.Event], None], timeout_s: float, tls: Contexts | None = None
    ) -> None:
        """Runs ``serve`` for each connection in a thread of its own, until the event is set. ``tls`` is only for those
        of the run's own processes.
        """
        self._tls = tls
        self._listening = threading.Thread(target=self._listen, args=(serve, timeout_s), name="kv-door", daemon=True)
        self._listening.start()

    def close(self) -> None:
        self._stopping.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._listening is not None:
            self._listening.join()
        self._socket.close()
        for thread, stream in list(self._threads.items()):
            stream.stop()
            thread.join()

    def _listen(self, serve: Callable[[Stream, threading.Event], None], timeout_s: float) -> None:
        while not self._stopping.is_set():
            try:
                connected, _ = self._socket.accept()
            except OSError:  # closed, or no file descriptor is free
                self._stopping.wait(TICK_S)
                continue
            self._threads = {thread: stream for thread, stream in self._threads.items() if thread.is_alive()}
            if len(self._threads) >= CONNECTIONS_MAX:
                connected.close()
                continue
            stream = Stream(connected, timeout_s)
            thread = threading.Thread(target=self._run, args=(serve, stream), name="kv-in", daemon=True)
            self._threads[thread] = stream
            thread.start()

    def _run(self, serve: Callable[[Stream, threading.Event], None], stream: Stream) -> None:
        try:
            stream.secure(self._tls, server=True)
            serve(stream, self._stopping)
        except TransferFailed as error:
            log.warning("refused a connection: %s", error)
        finally:
            stream.close()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _shown(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
