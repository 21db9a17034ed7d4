"""Detects whether a service that left files on this host is still running: a running one holds a file locked.

The lock is the kernel's (``flock``): it ends with the process, however that ends, and needs no process id.
"""

import fcntl
import os
from enum import Enum
from pathlib import Path


class Lock(Enum):
    """The result of locking a file."""

    HELD = "by us"
    TAKEN = "by another process"
    UNKNOWN = "this file system has no locks"


def hold_new(file: Path, content: str = "") -> int:
    """Creates a file, readable by its owner only, that is locked from its first moment on; an earlier one is replaced.

    Returns the descriptor that holds the lock until it is closed. On a file system without locks nothing is locked.
    """
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    unfinished.unlink(missing_ok=True)
    descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        rest = content.encode()
        while rest:  # on a disk that is nearly full a write takes a part of it
            rest = rest[os.write(descriptor, rest) :]
        _lock(descriptor)
        unfinished.replace(file)
    except BaseException:
        os.close(descriptor)
        unfinished.unlink(missing_ok=True)
        raise
    return descriptor


def hold(file: Path) -> int | None:
    """The descriptor that holds a file, which is made where it is absent; None where another process holds it."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    if _lock(descriptor) is Lock.TAKEN:
        os.close(descriptor)
        return None
    return descriptor


def is_abandoned(file: Path) -> bool:
    """Whether there is such a file, of this user, that nobody holds."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return os.fstat(descriptor).st_uid == os.getuid() and _lock(descriptor) is Lock.HELD
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> Lock:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return Lock.TAKEN
    except OSError:
        return Lock.UNKNOWN
    return Lock.HELD
