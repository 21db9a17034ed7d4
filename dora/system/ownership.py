"""Detects whether a service that left files on this host is still running: a running one holds a file locked.

The lock is the kernel's (``flock``): it ends with the process, however that ends, and needs no process id.
"""

import errno
import fcntl
import os
import socket
import tempfile
from contextlib import suppress
from enum import Enum
from pathlib import Path


class Lock(Enum):
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


class OwnerLocks:
    """The locks of a lock file and of its folder, which nobody can remove while its content stays."""

    def __init__(self, descriptors: tuple[int, ...]) -> None:
        self._descriptors = descriptors
        self.place = _place(os.fstat(descriptors[0]))  # of the lock file: a copy of the folder has another one

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = ()


def hold(file: Path) -> OwnerLocks | None:
    """Locks a lock file, which is created if absent, and its folder. Returns None if another process has one of them.
    The file then names this process.
    """
    descriptors: list[int] = []
    try:
        for path, flags in (
            (file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW),
            (file.parent, os.O_RDONLY | os.O_DIRECTORY),
        ):
            descriptors.append(os.open(path, flags, 0o600))
            if _lock(descriptors[-1]) is Lock.TAKEN:
                break
        else:
            with suppress(OSError):  # a full disk; the locks do not depend on it
                os.ftruncate(descriptors[0], 0)
                os.pwrite(descriptors[0], f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
            return OwnerLocks(tuple(descriptors))
    except BaseException:
        _close(descriptors)
        raise
    _close(descriptors)
    return None


def check_locks(folder: Path) -> None:
    """Raises OSError if files of this folder cannot be locked, or cannot be synced to the disk. Leaves nothing."""
    with tempfile.TemporaryFile(dir=folder) as file:
        if _lock(file.fileno()) is Lock.UNKNOWN:
            raise OSError(errno.ENOLCK, "its file system has no locks")
        os.fsync(file.fileno())


def is_held(file: Path) -> bool:
    """Returns whether a process holds this lock file or its folder. Creates nothing."""
    for path in (file, file.parent):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                if _lock(descriptor) is Lock.TAKEN:
                    return True
            finally:
                os.close(descriptor)
    return False


def owner_of(file: Path) -> str:
    try:
        pid, host = file.read_text(encoding="utf-8").split()
        return f"process {int(pid)} on {host}"
    except (OSError, ValueError):
        return "a running process"


def place_of(file: Path) -> str:
    """Returns the ``place`` that a lock file would have if it were held, or an empty text if there is no such file."""
    try:
        return _place(file.stat())
    except OSError:
        return ""


def _place(stat: os.stat_result) -> str:
    return f"{stat.st_dev}:{stat.st_ino}"


def is_abandoned(file: Path) -> bool:
    """Returns whether there is such a file, of this user, that nobody holds."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return os.fstat(descriptor).st_uid == os.getuid() and _lock(descriptor) is Lock.HELD
    finally:
        os.close(descriptor)


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _lock(descriptor: int) -> Lock:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return Lock.TAKEN
    except OSError:
        return Lock.UNKNOWN
    return Lock.HELD
