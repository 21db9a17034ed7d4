"""The weights of published versions on disk, for a service whose store is in memory.

FOLDER/<version>/    as in the store; links to files elsewhere are links here too
"""

import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from filecmp import cmp
from pathlib import Path
from typing import Final

from dora.system.files import link_or_copy, sync_folder

REPLACED_SUFFIX: Final = ".replaced"  # suffix of a version that is being replaced


class PersistedVersions:
    """Synchronous. Raises OSError if something cannot be written, and leaves nothing incomplete."""

    def __init__(self, folder: Path, *, repairs: bool = True) -> None:
        """Without ``repairs`` the folder is only read, and the result has the methods that read."""
        self.folder = folder
        self._doubted: set[int] = set()  # versions of which a write or fsync failed last
        if not repairs:
            return
        folder.mkdir(parents=True, exist_ok=True)
        for replaced in folder.glob(f".*{REPLACED_SUFFIX}"):
            kept = folder / replaced.name[1 : -len(REPLACED_SUFFIX)]
            if not kept.exists():  # its replacement was not complete
                os.rename(replaced, kept)
        for unfinished in folder.glob(".*"):
            shutil.rmtree(unfinished)

    def keep(self, version: int, folder: Path) -> None:
        """Writes a version to disk, in place of the one kept under its number."""
        kept, unfinished = self.folder / str(version), self.folder / f".{version}"
        replaced = unfinished.with_name(unfinished.name + REPLACED_SUFFIX)
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            _copied(folder, unfinished, may_link=version not in self._doubted)
            if kept.is_dir() and replaced.is_dir():  # the last try failed once its folder was in place
                shutil.rmtree(kept)
            elif kept.is_dir():
                os.rename(kept, replaced)
            os.rename(unfinished, kept)
            sync_folder(self.folder)
        except OSError:
            self._doubted.add(version)
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        self._doubted.discard(version)
        shutil.rmtree(replaced, ignore_errors=True)

    def drop(self, version: int) -> None:
        kept, gone = self.folder / str(version), self.folder / f".{version}"
        with suppress(FileNotFoundError):
            os.rename(kept, gone)  # readers see the whole folder or none
            shutil.rmtree(gone)

    def only(self, versions: Iterable[int]) -> None:
        """Drops all other versions: their publication was never acknowledged."""
        wanted = set(map(str, versions))
        for entry in self.folder.iterdir():
            if entry.name not in wanted:
                shutil.rmtree(entry)

    def lacking(self, versions: Iterable[int]) -> list[int]:
        return [version for version in versions if not self._kept(version).is_dir()]

    def damaged(self, versions: Iterable[int], store: Path, is_sound: Callable[[Path], bool]) -> list[int]:
        """Returns the versions that ``bring_back`` would find damaged, and changes nothing."""
        return [
            version
            for version in versions
            if version
            and not (_is_alike(store / str(version), self._kept(version)) and is_sound(store / str(version)))
            and not is_sound(self._kept(version))
        ]

    def _kept(self, version: int) -> Path:
        """The folder of a version. If a crash came while it was replaced, the one before is put back."""
        kept, replaced = self.folder / str(version), self.folder / f".{version}{REPLACED_SUFFIX}"
        return kept if kept.exists() or not replaced.exists() else replaced

    def bring_back(self, versions: Iterable[int], store: Path, is_sound: Callable[[Path], bool]) -> list[int]:
        """Makes a store's folder hold the kept versions and version 0; sound copies are left in place.

        ``is_sound`` checks a version's folder. Returns the kept versions that are damaged; they are not restored.
        """
        damaged = []
        wanted = {str(version): self.folder / str(version) for version in versions}
        store.mkdir(parents=True, exist_ok=True)
        for entry in list(store.iterdir()):
            if entry.name == "0":
                continue
            if entry.name not in wanted or not (_is_alike(entry, wanted[entry.name]) and is_sound(entry)):
                shutil.rmtree(entry)
        for name, kept in wanted.items():
            if name != "0" and not (store / name).is_dir():
                unfinished = store / f".{name}"
                _copied(kept, unfinished)
                if is_sound(unfinished):
                    os.rename(unfinished, store / name)
                else:
                    shutil.rmtree(unfinished)
                    damaged.append(int(name))
        return damaged


def _copied(source: Path, target: Path, *, may_link: bool = True) -> None:
    target.mkdir()
    for file in sorted(source.iterdir()):
        if file.is_symlink():
            os.symlink(os.readlink(file), target / file.name)
        elif file.is_file():
            link_or_copy(file, target / file.name, may_link=may_link)
    sync_folder(target)


def _is_alike(left: Path, right: Path) -> bool:
    """Returns whether two folders exist and have the same files; large ones are compared by size."""
    if not (left.is_dir() and right.is_dir()):
        return False
    names = {file.name for file in left.iterdir()}
    if names != {file.name for file in right.iterdir()}:
        return False
    return all(
        (left / name).is_symlink()
        or (
            ((left / name).stat().st_size == (right / name).stat().st_size)
            and (name.endswith(".safetensors") or cmp(left / name, right / name, shallow=False))
        )
        for name in names
    )
