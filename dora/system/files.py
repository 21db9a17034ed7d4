"""Files and folders that a user names: checked before the work starts. Also durable writes."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from dora.errors import InvalidValue


def check_folder(option: str, path: Path) -> None:
    """Raises InvalidValue if the parent folder of ``path`` does not exist."""
    if not path.parent.is_dir():
        raise InvalidValue(option, str(path), f"a file in a folder that exists, and {path.parent} does not")


def try_folder(folder: Path) -> None:
    """Makes ``folder`` if it is absent and writes in it, then undoes both. Raises the OSError that this meets."""
    absent = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    finally:
        for each in absent:
            with suppress(OSError):  # not made, or something of another process is in it by now
                each.rmdir()


def nearest_existing(folder: Path) -> Path:
    folder = folder.absolute()
    return next(each for each in (folder, *folder.parents) if each.exists())


def path_of(name: str, field: str) -> Path:
    """Returns the path that an outside text means, with ``~``. Raises InvalidValue, naming ``field``, if none is."""
    try:
        path = Path(name).expanduser()
        os.lstat(path)
    except FileNotFoundError:
        pass  # what is lacking is said by whoever wants it
    except (OSError, RuntimeError, ValueError) as error:  # too long, no such user, a byte that no name has
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidValue(field, name[:200], f"the name of a file or folder that can be reached ({reason})") from error
    return path


def entries(folder: Path) -> list[Path]:
    """Returns a folder's entries, by name, or none if there is no such folder: another thread may have deleted it."""
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def inner_entries(folder: Path) -> Iterator[Path]:
    """Yields the entries of a folder's own folders, except those deleted meanwhile (``Path.glob`` would raise)."""
    for inner in entries(folder):
        yield from entries(inner)


def link_or_copy(source: Path, target: Path, *, may_link: bool = True) -> None:
    """Puts a file that never changes at ``target``, durably. A hard link serves as well as a copy.

    After a failed fsync the caller repeats it without ``may_link``: another fsync of the same file proves nothing.
    """
    try:
        if not may_link:
            raise OSError
        os.link(source, target)
    except OSError:  # another disk, another user's file, or a file system without links
        shutil.copyfile(source, target)
    descriptor = os.open(target, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_durably(file: Path, text: str) -> None:
    """Replaces a private ``file``. A crash leaves the old or the new content. Raises OSError."""
    unfinished = file.with_name(f".{file.name}")
    unfinished.unlink(missing_ok=True)
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(unfinished, file)
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Makes a folder's names durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
