"""One version that is arriving in a host's store: chunks arrive in any order, from any thread, and each is checked."""

import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

from dora.errors import Conflict, InvalidValue
from dora.weights.files import sum_of
from dora.weights.manifest import Manifest, ManifestFile


class Receiving:
    """The files of a manifest, at their final sizes, in memory; completed or discarded in the end."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        complete: Callable[["Receiving"], Path],
        ended: Callable[["Receiving"], None],
    ) -> None:
        """Allocates the space of all files at once. Raises OSError if there is too little; nothing is left then.
        ``complete`` makes the version visible once all chunks have arrived; ``ended`` is called at the end in either
        case.
        """
        self.folder = folder
        self.manifest = manifest
        self._complete, self._ended = complete, ended
        self._files: dict[str, ManifestFile] = {file.name: file for file in manifest.files}
        self._there = {file.name: bytearray(file.chunks) for file in manifest.files}
        self._missing = sum(file.chunks for file in manifest.files)
        self._lock = threading.Lock()
        self._open = True
        self._maps: dict[str, mmap.mmap] = {}
        for file in manifest.files:
            self._maps[file.name] = _room(folder / file.name, file.file_bytes)

    def place(self, file: str, index: int) -> memoryview:
        """Returns memory for a chunk's bytes; call :meth:`placed` after writing them. Raises InvalidValue, Conflict.

        A chunk that has arrived already, and so may be in use, is returned as a copy: writing to it has no effect.
        """
        self._check_open()
        view = self._view(file, index)
        return memoryview(bytearray(len(view))) if self._there[file][index] else view

    def placed(self, file: str, index: int) -> bool:
        """Checks a chunk that was written to :meth:`place`. Returns False if it had arrived before.

        Raises InvalidValue if its bytes do not match the manifest; the chunk is then still missing.
        """
        self._check_open()
        if self._there[file][index]:
            return False
        found, expected = sum_of(self._view(file, index)), self._files[file].sums[index]
        if found != expected:
            allowed = f"{expected.hex()}, as in the manifest of {self.manifest.name}"
            raise InvalidValue(f"{file}: checksum of chunk {index}", found.hex(), allowed)
        with self._lock:
            if self._there[file][index]:
                return False
            self._there[file][index] = 1
            self._missing -= 1
        return True

    def write(self, file: str, index: int, content: bytes | bytearray | memoryview) -> bool:
        """Writes one whole chunk. Returns and raises as :meth:`placed`, and InvalidValue for another length."""
        target = self.place(file, index)
        if len(content) != len(target):
            raise InvalidValue(f"{file}: bytes of chunk {index}", len(content), str(len(target)))
        target[:] = content
        return self.placed(file, index)

    def has(self, file: str, index: int) -> bool:
        """Whether a chunk has arrived and was checked. Raises InvalidValue for a chunk that is not of this version."""
        self._named(file).chunk(index)
        return bool(self._there[file][index])

    def chunk(self, file: str, index: int) -> memoryview:
        """The bytes of an arrived chunk, read-only, to be sent on. Raises Conflict if it has not arrived."""
        if not self.has(file, index):
            raise Conflict(f"{file}: chunk", index, "a chunk that has arrived", why="has not arrived yet")
        self._check_open()
        return self._view(file, index).toreadonly()

    def missing(self) -> list[tuple[str, int]]:
        return [(name, index) for name, there in self._there.items() for index, found in enumerate(there) if not found]

    def take_from(self, base: Path, base_manifest: Manifest) -> int:
        """Copies the chunks that are equal in a stored version. Returns their number.

        The caller holds ``base``. A chunk that does not match its manifest is left to arrive by another way.
        """
        changed = set(self.manifest.changed_chunks(base_manifest))
        copied = 0
        for name in [file.name for file in self.manifest.files]:
            alike = [(each, at) for each, at in self.missing() if each == name and (each, at) not in changed]
            if not alike:
                continue
            with (base / name).open("rb") as stream:
                for _, index in alike:
                    offset, length = self._files[name].chunk(index)
                    content = os.pread(stream.fileno(), length, offset)
                    if len(content) == length and sum_of(content) == self._files[name].sums[index]:
                        copied += self.write(name, index, content)
        return copied

    def seal(self) -> Path:
        """Makes the version visible, by one rename, once all its chunks have arrived. Returns its folder.

        Raises Conflict if chunks are missing, InvalidValue if the tensors do not fit this host's model.
        """
        self._check_open()
        if self._missing:
            missing = f"{self._missing} of {sum(file.chunks for file in self.manifest.files)} chunks missing"
            raise Conflict(f"version {self.manifest.name}", missing, "whole", why="is not whole")
        try:
            return self._complete(self)
        finally:
            self.close()

    def close(self) -> None:
        """Discards the version unless it is sealed. Idempotent."""
        with self._lock:
            if not self._open:
                return
            self._open = False
        self._ended(self)
        self._maps.clear()  # each is unmapped with its last view

    def _named(self, file: str) -> ManifestFile:
        return self._files.get(file) or self.manifest.file(file)

    def _view(self, file: str, index: int) -> memoryview:
        offset, length = self._named(file).chunk(index)
        return memoryview(self._maps[file])[offset : offset + length]

    def _check_open(self) -> None:
        if not self._open:
            raise Conflict("version", self.manifest.name, "a version that is arriving", why="is sealed or discarded")


def _room(file: Path, file_bytes: int) -> mmap.mmap:
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, file_bytes)
        return mmap.mmap(descriptor, file_bytes)
    finally:
        os.close(descriptor)
