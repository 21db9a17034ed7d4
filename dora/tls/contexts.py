"""TLS between the processes of a run, over their own sockets: KV, and weights from relay to relay.

Both ends show a certificate. They know each other by the role in it, not by a host name: these processes listen at
addresses that the system chooses.
"""

import ssl
from datetime import UTC, datetime
from typing import Final

from dora.errors import TransferFailed
from dora.tls.certificate import holder_of_der
from dora.tls.files import Material, Tls
from dora.tls.handshake import context_of
from dora.tls.watched import Watched

OF_THE_RUN: Final = frozenset({"service", "host", "worker"})  # roles of those who send each other KV and weights


class Contexts:
    """The contexts of one process, with the files as they are at each connection."""

    def __init__(self, tls: Tls) -> None:
        """Raises InvalidValue for files that a server cannot use."""
        tls.check(serves=True)
        self._domain = tls.domain
        self._both = Watched(tls, _both)

    def context(self, *, server: bool) -> ssl.SSLContext:
        return self._both.current()[int(server)]

    def check_peer(self, der: bytes | None) -> None:
        """Raises TransferFailed unless this is the certificate of a process of the run."""
        holder = holder_of_der(der, self._domain) if der else None
        if holder is None or not holder.roles & OF_THE_RUN:
            roles = ", ".join(sorted(holder.roles)) if holder is not None else ""
            shown = f"its certificate is for {roles or 'no role'}"
            raise TransferFailed(f"{shown}; KV and weights are for {', '.join(sorted(OF_THE_RUN))}")
        if not holder.is_valid(datetime.now(UTC)):
            raise TransferFailed("its certificate is not valid now")


def _both(tls: Tls, _: Material) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    files = tls.ca, tls.cert, tls.key
    return context_of(*files, server=False), context_of(*files, server=True)
