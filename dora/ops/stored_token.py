"""The token file: a service on this host stores its token where the same user's commands find it.

The file is ``<port>.token`` of mode 0600, in the first writable folder of ``$XDG_RUNTIME_DIR/dora``,
``$XDG_CACHE_HOME/dora`` or ``~/.cache/dora``, and ``dora-<user id>`` in the temporary folder, which must be private to
this user.
"""

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dora.system.ownership import hold_new, is_abandoned
from dora.tls import Tls

DEFAULT_ADDRESS = "127.0.0.1:7070"
WHERE = "--token-file, DORA_TOKEN, or a service that you started on this host"  # sources of a token
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")


def token_folder() -> Path | None:
    """The folder for this user's token files; None if none is writable."""
    return next((folder for folder in _folders() if _usable(folder)), None)


def token_file(address: str) -> Path:
    """The token file of this user's service at ``address`` (host:port)."""
    return (token_folder() or _folders()[-1]) / _name(address)


def find_token(address: str) -> str:
    """Returns the token stored on this host for ``address``; empty if there is none.

    Returns none for another host's address: a secret of this host must not be sent elsewhere.
    """
    if address.rpartition(":")[0] not in LOOPBACK_HOSTS:
        return ""
    for folder in _folders():
        with suppress(OSError, UnicodeDecodeError):
            if not _shared(folder) or _private(folder):
                return (folder / _name(address)).read_text(encoding="utf-8").strip()
    return ""


def secret_for(address: str) -> str:
    """Returns the token for a command without one: none if it has a certificate, else what ``find_token`` finds."""
    tls = Tls.from_environment()
    return "" if tls is not None and tls.cert else find_token(address)


@contextmanager
def left_token(address: str, token: str) -> Iterator[Path | None]:
    """Stores ``token`` during the block; afterwards removes it, unless another service has replaced it.

    Yields None if it cannot be stored: commands then need DORA_TOKEN or ``--token-file``. Also removes the tokens of
    killed services.
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
    bases = [Path(base) for name in ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME") if (base := os.environ.get(name))]
    with suppress(RuntimeError):  # a user without a home folder
        bases.append(Path.home() / ".cache")
    return [*(base / "dora" for base in bases), Path(tempfile.gettempdir()) / f"dora-{os.getuid()}"]


def _usable(folder: Path) -> bool:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK) and (not _shared(folder) or _private(folder))


def _shared(folder: Path) -> bool:
    """Whether other users may have created this path."""
    return folder.parent == Path(tempfile.gettempdir())


def _private(folder: Path) -> bool:
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o077
