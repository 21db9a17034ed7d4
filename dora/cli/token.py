"""The token file: a service on this host leaves its secret where the same user's commands find it.

``$XDG_RUNTIME_DIR/dora/<port>.token``, or ``~/.cache/dora/<port>.token`` where there is no runtime folder;
mode 0600 in a folder of mode 0700.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dora.ownership import hold_new, is_abandoned

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")


def token_file(address: str) -> Path:
    """Where a service of this user at ``address`` (host:port) leaves its token."""
    base = os.environ.get("XDG_RUNTIME_DIR") or os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "dora" / f"{address.rpartition(':')[2]}.token"


def find_token(address: str) -> str:
    """The token that a service on this host left for ``address``; empty where there is none.

    Never looks for another host's: a secret of this host must not be sent elsewhere.
    """
    if address.rpartition(":")[0] not in LOOPBACK_HOSTS:
        return ""
    try:
        return token_file(address).read_text().strip()
    except OSError:
        return ""


@contextmanager
def left_token(address: str, token: str) -> Iterator[Path]:
    """Leaves ``token`` for the duration of the block; afterwards removes it, unless another service replaced it.

    Tokens that services have left which were killed are removed.
    """
    file = token_file(address)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for other in file.parent.glob("*.token"):
        if is_abandoned(other):
            other.unlink(missing_ok=True)
    held = hold_new(file, token + "\n")
    try:
        yield file
    finally:
        with suppress(OSError):
            if file.read_text().strip() == token:
                file.unlink()
        os.close(held)
