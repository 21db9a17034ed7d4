"""Reads a secret from a file that only its owner can read."""

import os
import stat
from pathlib import Path
from typing import Final

from dora.errors import InvalidValue

OPTION: Final = "--token-file"
ALLOWED: Final = "a file of mode 0600 that contains the token"
SECRET_MAX_BYTES: Final = 4096


def read_token(file: Path, option: str = OPTION) -> str:
    """Returns the token in ``file``. Raises InvalidValue, naming ``option``, if it is unreadable or not private."""
    try:
        with file.open(encoding="utf-8") as opened:
            found = os.fstat(opened.fileno())
            mode = stat.S_IMODE(found.st_mode)
            is_handed = found.st_uid == 0 != os.getuid()  # root gave it to a group of this user, as a kubelet does
            if mode & (0o007 if is_handed else 0o077):
                raise InvalidValue(option, f"{file} (mode {mode:04o})", ALLOWED)
            return opened.read(SECRET_MAX_BYTES).strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise InvalidValue(option, f"{file} ({reason})", ALLOWED) from error
