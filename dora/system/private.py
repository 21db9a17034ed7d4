"""Files that only this user may read: the umask of DORA's processes, and the owners of folders that they use.

Every process of a service runs with ``PRIVATE_UMASK``, so its files have mode 0600 and its folders 0700. A folder in a
place that others can write to, such as ``/dev/shm``, has a name that nobody can guess, and is checked before use.
"""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dora.errors import InvalidValue

PRIVATE_UMASK: Final = 0o077
PRIVATE_MODE: Final = 0o700
_ROOT: Final = 0


@contextlib.contextmanager
def private_files() -> Iterator[int]:
    """Makes new files and folders of this process private within the context. Yields the umask from before."""
    before = os.umask(PRIVATE_UMASK)
    try:
        yield before
    finally:
        os.umask(before)


def private_folder(folder: Path, field: str) -> None:
    """Creates ``folder`` for this user alone, or makes an existing one private.

    Raises InvalidValue, naming ``field``, if another user made it or a link to it, and OSError if it cannot be made.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=PRIVATE_MODE, exist_ok=True)
    check_owner(folder, field)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.getuid():
            _check(folder, field, found)
        elif stat.S_IMODE(found.st_mode) != PRIVATE_MODE:
            os.fchmod(descriptor, PRIVATE_MODE)
    finally:
        os.close(descriptor)


def check_owner(folder: Path, field: str) -> None:
    """Raises InvalidValue, naming ``field``, if an existing folder, or a link to it, is another user's.

    Root's folders are accepted: a mounted volume is often root's. Root itself accepts another user's folder, as
    containers have it, except in a folder in which every user can make one.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for found in (folder.lstat(), folder.stat()):
            _check(folder, field, found)


def is_own_folder(folder: Path) -> bool:
    """Returns whether it is a folder of this user, and no link to one."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def _check(folder: Path, field: str, found: os.stat_result) -> None:
    if found.st_uid in (os.getuid(), _ROOT):
        return
    if os.getuid() == _ROOT and not folder.absolute().parent.stat().st_mode & stat.S_IWOTH:
        return
    raise InvalidValue(field, str(folder), f"a folder of this user: it belongs to user {found.st_uid}")
