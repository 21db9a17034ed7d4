"""Who uses a version of a host's store: a file for each, locked as long as its process holds the version.

    FOLDER/holds/<name>/<holder>    locked: it is held, and its store keeps the version's files as they are

The lock is the kernel's, so that a holder that is killed holds nothing any more.
"""

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from dora.errors import NotFound
from dora.system.ownership import hold_new, is_abandoned
from dora.weights.manifest import parsed_name

HOLDS_FOLDER: Final = "holds"
VERSIONS_FOLDER: Final = "versions"
NAME_FILE: Final = "dora-name"  # in a version's folder: the name of its manifest
RETIRED_FILE: Final = "dora-retired"  # beside it: nobody new may hold it
_serial: Final = itertools.count()


@contextmanager
def held(store: Path, name: str, holder: str) -> Iterator[Path]:
    """The folder of the version called ``name``, whose files stay as they are until the end.

    ``store``: the folder of this host's store; ``holder``: who holds it, as operators see it.
    Raises NotFound where the store does not have this version whole, or has retired it.
    """
    folder = store / HOLDS_FOLDER / name
    file = folder / f"{holder}.{os.getpid()}.{next(_serial)}"
    _check_here(store, name)  # else a folder would be left for a version that never comes
    try:
        folder.mkdir(exist_ok=True)
        descriptor = hold_new(file)  # before the look: a store that retires the version looks for holders last
    except FileNotFoundError as error:
        raise NotFound("version", name, f"one that {store} holds", why="is in no store: there is none") from error
    try:
        yield _check_here(store, name)
    finally:
        file.unlink(missing_ok=True)
        os.close(descriptor)


def _check_here(store: Path, name: str) -> Path:
    """The version's folder. Raises NotFound where it is not there, or retired."""
    version, _ = parsed_name(name)
    found = store / VERSIONS_FOLDER / str(version)
    if name_of(found) != name or (found / RETIRED_FILE).exists():
        raise NotFound("version", name, f"one that {store} holds", why="is not in this host's store")
    return found


def name_of(folder: Path) -> str:
    """The name of the version in ``folder``; empty where there is none that can be read."""
    try:
        return (folder / NAME_FILE).read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def holders(store: Path, name: str) -> tuple[str, ...]:
    """Who holds a version now. What the dead have left is removed."""
    found = []
    with suppress(FileNotFoundError):
        for file in sorted((store / HOLDS_FOLDER / name).iterdir()):
            if is_abandoned(file):
                file.unlink(missing_ok=True)
            elif not file.name.startswith("."):
                found.append(file.name.rsplit(".", 2)[0])
    return tuple(found)
