"""The socket at which a front listens."""

import os
import socket
from typing import Final

from dora.errors import MISSING, InvalidValue
from dora.rpc.channel import is_loopback

OPTION: Final = "--http"
INHERITED: Final = "fd:"  # begins the number of a listening socket that the parent has opened
BACKLOG: Final = 1024


def listening_socket(listen: str, *, has_key: bool) -> socket.socket:
    """Returns a listening socket: a new one at host:port, or the parent's. Clients need a key or certificate if
    ``has_key``. Raises InvalidValue, also for an address that others reach while any key will do.
    """
    if listen.startswith(INHERITED) and listen.removeprefix(INHERITED).isdecimal():
        return socket.socket(fileno=int(listen.removeprefix(INHERITED)))
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise InvalidValue(OPTION, listen, "host:port with a port of 0 to 65535, e.g. 127.0.0.1:8000")
    if not has_key and (host in ("0.0.0.0", "::") or not is_loopback(host)):
        raise InvalidValue("--key-file", MISSING, f"given, as other hosts reach {listen}; or listen at 127.0.0.1")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, int(port)), family=family, backlog=BACKLOG)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise InvalidValue(OPTION, listen, f"a free address of this host ({reason})") from error


def url_of(listening: socket.socket, *, secure: bool = False) -> str:
    """Returns the URL of a front that listens there, ``secure`` under TLS."""
    host, port = listening.getsockname()[:2]
    return f"{'https' if secure else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
