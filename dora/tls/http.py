"""TLS of the HTTP servers: the front's, and that of the metrics' pages.

A connection is secured with the files as they are when it begins. Its HTTP server has it afterwards, so a connection
whose handshake fails or hangs costs that server nothing.
"""

import asyncio
import ssl
from collections.abc import Callable
from typing import Final, cast

from dora.system.crowd import Crowd
from dora.tls.certificate import Holder, holder_of_der
from dora.tls.files import Material, Tls
from dora.tls.handshake import context_of
from dora.tls.watched import Watched

HANDSHAKE_S: Final = 10.0
HANDSHAKES_MAX: Final = 256  # at once; the oldest of the host that has most makes room for another
SHUTDOWN_S: Final = 5.0  # that a client has to end TLS
PROTOCOL: Final = "http/1.1"
MakeProtocol = Callable[[], asyncio.BaseProtocol]


class HttpTls:
    """The TLS of one server. If ``mutual``, clients without a certificate of the authority cannot connect. Otherwise a
    certificate that is shown must be of it.
    """

    def __init__(self, tls: Tls, *, mutual: bool) -> None:
        """Raises InvalidValue for files that a server cannot use."""
        tls.check(serves=True)
        self.mutual = mutual
        self.tls = tls
        self._context = Watched(tls, self._made)
        self._shaking: set[asyncio.Task[None]] = set()
        self._crowd = Crowd(HANDSHAKES_MAX)

    def _made(self, tls: Tls, _: Material) -> ssl.SSLContext:
        context = context_of(tls.ca, tls.cert, tls.key, server=True)
        context.set_alpn_protocols([PROTOCOL])
        if not self.mutual:
            context.verify_mode = ssl.CERT_OPTIONAL
        return context

    def connecting(self, make: MakeProtocol) -> MakeProtocol:
        """Returns the maker of protocols for a listener's connections. ``make`` makes that of a secured connection."""
        return lambda: _Handshake(self, make)

    def holder(self, transport: asyncio.BaseTransport | None) -> Holder | None:
        """Returns the holder of the certificate that the connection's client has shown, or None."""
        secured = None if transport is None else transport.get_extra_info("ssl_object")
        shown = None if secured is None else secured.getpeercert(binary_form=True)
        return holder_of_der(shown, self.tls.domain) if shown else None

    async def close(self) -> None:
        """Ends handshakes that are under way."""
        for task in self._shaking:
            task.cancel()
        await asyncio.gather(*self._shaking, return_exceptions=True)

    def begin(self, transport: asyncio.Transport, handshake: "_Handshake", make: MakeProtocol) -> None:
        self._crowd.enter(transport)
        transport.pause_reading()
        task = asyncio.create_task(self._shake(transport, handshake, make))
        self._shaking.add(task)
        task.add_done_callback(self._shaking.discard)

    async def _shake(self, transport: asyncio.Transport, handshake: "_Handshake", make: MakeProtocol) -> None:
        try:
            secured = await asyncio.get_running_loop().start_tls(
                transport,
                handshake,
                self._context.current(),
                server_side=True,
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=SHUTDOWN_S,
            )
        except OSError:  # TLS has told the client why, or it has left
            return
        finally:
            self._crowd.leave(transport)
        if secured is not None and not handshake.is_lost:
            handshake.hand_over(secured, cast(asyncio.Protocol, make()))


class _Handshake(asyncio.Protocol):
    """Holds a connection until it is secured, and what comes right behind the handshake."""

    def __init__(self, guard: HttpTls, make: MakeProtocol) -> None:
        self._guard = guard
        self._make = make
        self._came = bytearray()
        self.is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._guard.begin(cast(asyncio.Transport, transport), self, self._make)

    def data_received(self, data: bytes) -> None:
        self._came += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True

    def hand_over(self, secured: asyncio.Transport, protocol: asyncio.Protocol) -> None:
        secured.set_protocol(protocol)
        protocol.connection_made(secured)
        if self._came:
            protocol.data_received(bytes(self._came))
