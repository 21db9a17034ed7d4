"""Token files for commands: a token is no argument."""

import atexit
import os
import tempfile
from functools import cache


@cache
def with_token(token: str) -> str:
    """Returns the path of a private file with the token, removed at the end of this process."""
    descriptor, path = tempfile.mkstemp(prefix="dora-token-")
    with os.fdopen(descriptor, "w") as stream:
        stream.write(token + "\n")
    atexit.register(_remove, path, os.getpid())
    return path


def _remove(path: str, owner: int) -> None:
    if os.getpid() == owner:  # not at the end of a fork
        os.unlink(path)
