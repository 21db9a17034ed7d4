"""The token file: a service on this host leaves its secret where the same user's commands find it.

``<port>.token``, of mode 0600, in the first of these folders that can be written: ``$XDG_RUNTIME_DIR/dora``,
``$XDG_CACHE_HOME/dora`` or ``~/.cache/dora``, and ``dora-<user id>`` in the folder for temporary files, which has to be
this user's and nobody else's.
"""

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dora.system.ownership import hold_new, is_abandoned

DEFAULT_ADDRESS = "127.0.0.1:7070"
WHERE = "--token, DORA_TOKEN, or a service that you started on this host"  # a token comes from
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")


def token_folder() -> Path | None:
    """Where tokens of this user's services are left; None where no such folder can be written."""
    return next((folder for folder in _folders() if _usable(folder)), None)


def token_file(address: str) -> Path:
    """Where a service of this user at ``address`` (host:port) leaves its token."""
    return (token_folder() or _folders()[-1]) / _name(address)


def find_token(address: str) -> str:
    """The token that a service on this host left for ``address``; empty where there is none.

    Never looks for another host's: a secret of this host must not be sent elsewhere.
    """
    if address.rpartition(":")[0] not in LOOPBACK_HOSTS:
        return ""
    for folder in _folders():
        with suppress(OSError, UnicodeDecodeError):
            if not _shared(folder) or _private(folder):
                return (folder / _name(address)).read_text(encoding="utf-8").strip()
    return ""


@contextmanager
def left_token(address: str, token: str) -> Iterator[Path | None]:
    """Leaves ``token`` for the duration of the block; afterwards removes it, unless another service replaced it.

    Yields None where it cannot be left: commands then have to be given it. Tokens of services that were killed are
    removed.
    """
    file = token_file(address)
    held = None
    with suppress(OSError):
        for other in file.parent.glob("*.token"):
            if is_abandoned(other):
                other.unlink(missing_ok=True)
        held = hold_new(file, token + "\n")
    try:
        yield file if held is not None else None
    finally:
        if held is not None:
            with suppress(OSError):
                if file.read_text(encoding="utf-8").strip() == token:
                    file.unlink()
            os.close(held)


def _name(address: str) -> str:
    return f"{address.rpartition(':')[2]}.token"


def _folders() -> list[Path]:
    """The folders that a token may lie in, the best first."""
    bases = [Path(base) for name in ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME") if (base := os.environ.get(name))]
    with suppress(RuntimeError):  # a user without a home
        bases.append(Path.home() / ".cache")
    return [*(base / "dora" for base in bases), Path(tempfile.gettempdir()) / f"dora-{os.getuid()}"]


def _usable(folder: Path) -> bool:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK) and (not _shared(folder) or _private(folder))


def _shared(folder: Path) -> bool:
    """Whether others may have made what is at this place."""
    return folder.parent == Path(tempfile.gettempdir())


def _private(folder: Path) -> bool:
    """Whether it is a folder of this user that nobody else may look into."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o077
