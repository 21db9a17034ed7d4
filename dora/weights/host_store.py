"""The weight store of one host: every live version once, in a folder that should be in memory (tmpfs).

    FOLDER/receiving/<name>/      a version that is arriving: of its final size, and not to be read
    FOLDER/versions/<version>/    a loadable Hugging Face folder, complete or absent; its manifest's name in dora-name
    FOLDER/holds/<name>/          its holders (holds.py); a held version is retained until it is released

Each host has one store, with the model's own folder linked as version 0. A version arrives by its manifest, chunk by
chunk (:meth:`HostStore.receive`), and becomes visible by one rename. Synchronous; calls about one version come from one
thread.
"""

import logging
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from blake3 import blake3

from dora.data.types import Canary
from dora.errors import Conflict, InvalidValue, LimitExceeded, NotFound, is_full
from dora.system.files import entries, inner_entries
from dora.weights.canary import check_canary
from dora.weights.files import SUFFIX
from dora.weights.holds import HOLDS_FOLDER, NAME_FILE, RETIRED_FILE, VERSIONS_FOLDER, held, holders, name_of
from dora.weights.manifest import DIGEST_CHARACTERS, Manifest, parsed_name, version_name
from dora.weights.receiving import Receiving
from dora.weights.reference import (
    INDEX_FILE,
    Reference,
    TensorHeader,
    check_tensors,
    read_header,
    read_reference,
)
from dora.weights.whole import MANIFEST_FILE as MANIFEST_FILE
from dora.weights.whole import canary_in, index_of, is_sound, manifest_in, write_canary

log = logging.getLogger("dora.weights")

RECEIVING_FOLDER: Final = "receiving"
_METADATA_BYTES: Final = 1 << 20  # maximum of all safetensors headers of a version, beside the tensors' entries
_ENTRY_BYTES: Final = 1 << 10  # per tensor in a header
_WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".msgpack", ".h5")


def bound_of(reference: Reference, versions: int) -> int:
    """The maximum size of this many versions of a model, including the safetensors headers."""
    return versions * (reference.content_bytes + header_bytes_of(reference))


def header_bytes_of(reference: Reference) -> int:
    """The maximum size of the headers of all files of a version."""
    return _METADATA_BYTES + _ENTRY_BYTES * len(reference.tensors)


def model_digest(reference: Reference) -> str:
    """The digest of a model's tensor names, dtypes, shapes and vocabulary. It is the same on all hosts of a run."""
    found = blake3(f"{reference.vocab_size}".encode())
    for tensor in reference.tensors:
        found.update(f"\n{tensor.name} {tensor.dtype} {tensor.shape} {tensor.optional}".encode())
    return found.hexdigest()[:DIGEST_CHARACTERS]


class HostStore:
    """Stores the files of every live version. See the module's docstring for the layout."""

    def __init__(self, folder: Path, reference: Path, kept_version: int | None = None, bound_bytes: int = 0) -> None:
        """Opens or creates the store; version 0 is the model folder ``reference``, linked, not copied.

        ``kept_version`` is never retired: it has the reference weights of the trainers' KL terms. Complete versions of
        an earlier process are retained. ``bound_bytes`` limits all versions, including arriving ones; 0 is the size of
        the file system (``bound_of``). Raises InvalidValue if ``reference`` is not a model.
        """
        self.root = folder
        self.bound_bytes = bound_bytes
        self._kept_version = kept_version
        self.reference: Reference = read_reference(reference)
        self._versions = folder / VERSIONS_FOLDER
        self._receiving_folder = folder / RECEIVING_FOLDER
        for made in (self._versions, self._receiving_folder, folder / HOLDS_FOLDER):
            made.mkdir(parents=True, exist_ok=True)
        for unfinished in (*self._versions.glob(".*"), *self._receiving_folder.iterdir()):
            shutil.rmtree(unfinished)
        self._receiving: dict[str, Receiving] = {}
        self._changing = threading.RLock()
        self._set_aside_count = 0
        self._canaries: dict[int, Canary] = {}  # reproduced by the first workers
        self._link_reference()

    # -------------------------------------------------------------------------------------------------------- reading

    def versions(self) -> tuple[int, ...]:
        found = (int(entry.name) for entry in self._versions.iterdir() if entry.name.isdigit())
        return tuple(sorted(version for version in found if self._is_live(version)))

    def folder(self, version: int) -> Path:
        """A loadable Hugging Face folder. Raises NotFound for a version that is not stored."""
        if not self._is_live(version):
            known = ", ".join(map(str, self.versions()))
            raise NotFound("version", version, f"one of the stored versions: {known or '(none)'}", why="is not held")
        return self._versions / str(version)

    def name(self, version: int) -> str:
        """The version's name in orders and relays, e.g. ``v17-3f2a...``. Raises NotFound."""
        return name_of(self.folder(version))

    def manifest(self, version: int) -> Manifest:
        """Returns the manifest, with its canary. Raises NotFound, also for version 0, which every host has."""
        folder = self.folder(version)
        if not (folder / MANIFEST_FILE).is_file():
            raise NotFound("version", version, "a published version: every host has the model itself")
        return manifest_in(folder).with_canary(self.canary(version))

    def hold(self, version: int, holder: str) -> AbstractContextManager[Path]:
        """The version's folder, whose files do not change within the context. Raises NotFound.

        A worker does not need a store object: ``holds.held`` is enough.
        """
        return held(self.root, self.name(version), holder)

    def holders(self, version: int) -> tuple[str, ...]:
        """The holders of a version: workers that load it, relays that send it. Raises NotFound."""
        return holders(self.root, self.name(version))

    def canary(self, version: int) -> Canary | None:
        """The canary published with ``version``; None if there was none. Raises NotFound."""
        kept = self._canaries.get(version)
        if kept is not None:
            return kept
        return canary_in(self.folder(version))

    def keep_canary(self, version: int, canary: Canary) -> None:
        """Stores the canary of a version published without one, as its first worker reproduced it. Raises NotFound.

        If it cannot be written (OSError), this process still remembers it.
        """
        with self._changing:  # a thread may retire the version
            folder = self.folder(version)
            self._canaries[version] = canary
            write_canary(folder, canary)

    def is_sound(self, version: int) -> bool:
        """Whether the version is stored and its files match its manifest. Reads all of them."""
        try:
            with self.hold(version, "check") as folder:
                return is_sound(folder)
        except InvalidValue:
            return False

    @property
    def held_bytes(self) -> int:
        """Bytes of all weights here, including retired versions that are held and arriving ones."""
        return sum(weights_bytes(folder) for folder in (self._versions, self._receiving_folder))

    def check_room(self, what: str, file_bytes: int) -> None:
        """Raises LimitExceeded if ``file_bytes`` more would exceed the limit or the free space of the host."""
        self.sweep()
        held_bytes = self.held_bytes
        if self.bound_bytes and held_bytes + file_bytes > self.bound_bytes:
            left = max(0, self.bound_bytes - held_bytes)
            bound = f"this host's store is limited to {self.bound_bytes:,}, of which {held_bytes:,} are in use"
            allowed = f"at most {left:,} bytes now: {bound}, by {self._in_use()}"
            raise LimitExceeded(what, f"{file_bytes:,} bytes", allowed)
        room = os.statvfs(self.root)
        free_bytes = room.f_bavail * room.f_frsize
        if file_bytes > free_bytes:
            raise LimitExceeded(
                what, f"{file_bytes:,} bytes", f"at most {free_bytes:,} bytes: all that {self.root} has left"
            )

    def _in_use(self) -> str:
        found = [f"version {version}" for version in self.versions() if version]
        for version in self.leaving():
            users = ", ".join(holders(self.root, name_of(self._versions / str(version))))
            found.append(f"version {version}, retired and held by {users or 'nobody now'}")
        found += [f"{folder.name}, which is arriving" for folder in sorted(self._receiving_folder.iterdir())]
        return "; ".join(found) or "nothing"

    # ------------------------------------------------------------------------------------------------------ receiving

    def receive(self, manifest: Manifest) -> Receiving:
        """Begins to receive a version. Allocates its space before any byte is sent.

        Raises Conflict if the version, or another one of this number, is stored or arriving; InvalidValue if its
        tensors are not the model's; LimitExceeded if there is no room for it.
        """
        with self._changing:
            self._check_absent(manifest)
            if manifest.name in self._receiving:
                raise Conflict("version", manifest.name, "a version that is not stored here", why="is arriving already")
            self.check_tensors({each.header.name: each.header for each in manifest.tensors})
            if manifest.canary is not None:
                check_canary(manifest.canary, self.reference.vocab_size)
            self.check_room(f"weights: version {manifest.version}", manifest.total_bytes)
            folder = self._receiving_folder / manifest.name
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            try:
                receiving = Receiving(folder, manifest, self._sealed, self._received)
            except OSError as error:
                shutil.rmtree(folder, ignore_errors=True)
                if not is_full(error):
                    raise
                what, size = f"weights: version {manifest.version}", f"{manifest.total_bytes:,} bytes"
                raise LimitExceeded(what, size, f"a size that {self.root} has room for ({error.strerror})") from error
            self._receiving[manifest.name] = receiving
        return receiving

    def receiving(self, name: str) -> Receiving | None:
        return self._receiving.get(name)

    def check_tensors(self, found: Mapping[str, TensorHeader]) -> None:
        """Raises InvalidValue for the first tensor that differs from the model's."""
        check_tensors(found, self.reference.tensors)

    def _sealed(self, receiving: Receiving) -> Path:
        manifest, found = receiving.manifest, {}
        for file in manifest.files:
            found[file.name] = read_header(receiving.folder / file.name)
        placed = {each.header.name: each.header for each in manifest.tensors}
        if {name: header for headers in found.values() for name, header in headers.items()} != placed:
            raise InvalidValue(f"{manifest.name}: tensors", "different from those in its files", "those in its files")
        with self._changing:
            self._check_absent(manifest)
            return self._admit(receiving.folder, manifest)

    def _check_absent(self, manifest: Manifest) -> None:
        """Raises Conflict if a version of this number is stored, such as one that was published again meanwhile."""
        if self._is_live(manifest.version):
            found = name_of(self._versions / str(manifest.version))
            why = "is here already" if found == manifest.name else f"is here as {found}"
            raise Conflict("version", manifest.name, "a version that is not stored here", why=why)

    def _received(self, receiving: Receiving) -> None:
        with self._changing:
            self._receiving.pop(receiving.manifest.name, None)
        shutil.rmtree(receiving.folder, ignore_errors=True)

    def _admit(self, folder: Path, manifest: Manifest) -> Path:
        """Makes ``folder``, whose weights are checked, the version of its manifest, by one rename. Returns its path.

        If a write fails (OSError), the store's earlier contents remain.
        """
        target = self._versions / str(manifest.version)
        replaced = self._versions / f".{manifest.version}.replaced"
        self._complete(folder, manifest)
        with self._changing:
            shutil.rmtree(replaced, ignore_errors=True)
            if target.is_dir():
                os.rename(target, replaced)
            try:
                os.rename(folder, target)
            except OSError:
                if replaced.is_dir():
                    os.rename(replaced, target)
                raise
            self._canaries.pop(manifest.version, None)
        shutil.rmtree(replaced, ignore_errors=True)
        return target

    def _complete(self, folder: Path, manifest: Manifest) -> None:
        self._link_side_files(folder)
        if index := index_of(manifest):
            (folder / INDEX_FILE).write_text(index)
        (folder / MANIFEST_FILE).write_text(manifest.with_canary(None).to_json())
        (folder / NAME_FILE).write_text(manifest.name)
        if manifest.canary is not None:
            write_canary(folder, manifest.canary)

    # ------------------------------------------------------------------------------------------------------- retiring

    def retire(self, version: int) -> None:
        """Frees a version that left the window, unless it is ``kept_version``. Unknown versions are ignored.

        A held version is freed when it is released; until then it accepts no new holders.
        """
        if version != self._kept_version:
            self._remove(version)

    def set_aside(self, version: int) -> Path | None:
        """Retires a version, but moves its files into the returned folder, which ``free`` deletes, as large ones take a
        while. Returns None if there is nothing to free now.
        """
        return None if version == self._kept_version else self._set_aside(version)

    def free(self, gone: Path) -> None:
        """Deletes a folder that was set aside. Thread-safe."""
        shutil.rmtree(gone, ignore_errors=True)

    def leaving(self) -> tuple[int, ...]:
        """The retired versions that are still stored because they were held at the last scan; ascending."""
        folders = (folder for folder in entries(self._versions) if folder.name.isdigit())
        return tuple(sorted(int(folder.name) for folder in folders if (folder / RETIRED_FILE).exists()))

    def sweep(self) -> None:
        """Frees the retired versions that are no longer held."""
        for version in self.leaving():
            self._remove(version)

    def _remove(self, version: int) -> None:
        gone = self._set_aside(version)
        if gone is not None:
            self.free(gone)

    def _set_aside(self, version: int) -> Path | None:
        folder = self._versions / str(version)
        with self._changing:
            self._canaries.pop(version, None)
            if not folder.is_dir():
                return None
            name = name_of(folder) if self._is_named(version) else ""
            (folder / RETIRED_FILE).touch()  # no new holders after this; then scan for existing ones
            users = holders(self.root, name) if name else ()  # a version whose name is damaged cannot be held
            if users:
                log.info("version %d is retired; it is kept until released by %s", version, ", ".join(users))
                return None
            self._set_aside_count += 1
            gone = self._versions / f".{version}.gone-{self._set_aside_count}"
            os.rename(folder, gone)  # readers see the whole folder or none
        if name:
            shutil.rmtree(self.root / HOLDS_FOLDER / name, ignore_errors=True)
        return gone

    def _is_named(self, version: int) -> bool:
        try:
            return parsed_name(name_of(self._versions / str(version)))[0] == version
        except InvalidValue:
            return False

    # ---------------------------------------------------------------------------------------------------------- folders

    def _is_live(self, version: int) -> bool:
        folder = self._versions / str(version)
        return folder.is_dir() and not (folder / RETIRED_FILE).exists()

    def _link_reference(self) -> None:
        model, unfinished = self._versions / "0", self._versions / ".0"
        name = version_name(0, model_digest(self.reference))
        expected = {file.name: os.fspath(file.resolve()) for file in self._files_of_reference()}
        if name_of(model) == name and _links(model) == expected:
            return
        unfinished.mkdir()
        for link, target in expected.items():
            (unfinished / link).symlink_to(target)
        (unfinished / NAME_FILE).write_text(name)
        shutil.rmtree(model, ignore_errors=True)
        os.rename(unfinished, model)
        for version in self.versions():
            self._link_side_files(self._versions / str(version))

    def _files_of_reference(self) -> Iterator[Path]:
        names = [*self.reference.files]
        if (self.reference.folder / INDEX_FILE).is_file():
            names.append(INDEX_FILE)
        yield from (self.reference.folder / name for name in names)
        yield from self._side_files()

    def _side_files(self) -> Iterator[Path]:
        for file in self.reference.folder.iterdir():
            if file.is_file() and not file.name.endswith((*_WEIGHT_SUFFIXES, ".index.json")):
                yield file

    def _link_side_files(self, folder: Path) -> None:
        found = _links(folder)
        for file in self._side_files():
            target = os.fspath(file.resolve())
            if found.get(file.name) != target:
                (folder / file.name).unlink(missing_ok=True)
                (folder / file.name).symlink_to(target)


def _links(folder: Path) -> dict[str, str]:
    if not folder.is_dir():
        return {}
    return {file.name: os.readlink(file) for file in folder.iterdir() if file.is_symlink()}


def weights_bytes(folder: Path) -> int:
    """The size of the weights in a folder's own folders, without those that are being deleted."""
    return sum(size_here(file) for file in inner_entries(folder) if file.suffix == SUFFIX)


def size_here(file: Path) -> int:
    """The size of a file stored here; a link takes no space."""
    try:
        return 0 if file.is_symlink() else file.stat().st_size
    except OSError:  # removed meanwhile
        return 0
