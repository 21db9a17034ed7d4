"""Holders of the versions in a host's store: one file each, locked while its process holds the version.

    FOLDER/holds/<name>/<holder>    locked: it is held, and its store keeps the version's files as they are

The kernel releases the lock of a holder that is killed.
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
GPUS_FILE: Final = "gpus.json"  # of the service's own store: the GPUs of its host
VERSIONS_FOLDER: Final = "versions"
NAME_FILE: Final = "dora-name"  # in a version's folder: the name of its manifest
RETIRED_FILE: Final = "dora-retired"  # beside it: the version accepts no new holders
_serial: Final = itertools.count()


@contextmanager
def held(store: Path, name: str, holder: str) -> Iterator[Path]:
    """Holds the version called ``name``. Returns its folder, whose files do not change within the context.

    ``store`` is the folder of this host's store, ``holder`` the holder's name for operators. Raises NotFound if the
    store does not have the complete version, or has retired it.
    """
    folder = store / HOLDS_FOLDER / name
    file = folder / f"{holder}.{os.getpid()}.{next(_serial)}"
    _check_here(store, name)  # otherwise a folder would remain for a version that never arrives
    try:
        folder.mkdir(exist_ok=True)
        descriptor = hold_new(file)  # before the second check: a store that retires the version scans for holders last
    except FileNotFoundError as error:
        raise NotFound("version", name, f"one that {store} holds", why="is missing: this host has no store") from error
    try:
        yield _check_here(store, name)
    finally:
        file.unlink(missing_ok=True)
        os.close(descriptor)


def _check_here(store: Path, name: str) -> Path:
    version, _ = parsed_name(name)
    found = store / VERSIONS_FOLDER / str(version)
    if name_of(found) != name or (found / RETIRED_FILE).exists():
        raise NotFound("version", name, f"one that {store} holds", why="is not in this host's store")
    return found


def name_of(folder: Path) -> str:
    """The name of the version in ``folder``; empty if there is no readable one."""
    try:
        return (folder / NAME_FILE).read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def holders(store: Path, name: str) -> tuple[str, ...]:
    """The current holders of a version. Removes the files of dead holders."""
    found = []
    with suppress(FileNotFoundError):
        for file in sorted((store / HOLDS_FOLDER / name).iterdir()):
            if is_abandoned(file):
                file.unlink(missing_ok=True)
            elif not file.name.startswith("."):
                found.append(file.name.rsplit(".", 2)[0])
    return tuple(found)
