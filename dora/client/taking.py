"""Copies a trainer's weights once, so that training can continue. Publishing works on the copy.

The copy is a safetensors file in memory, laid out before the first tensor is copied. With a prepared ``Spare`` its
pages are already allocated, so the copy takes only the time of copying memory.
"""

import mmap
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from dora.errors import InvalidValue
from dora.weights.examining import examine_file
from dora.weights.files import WeightFile, copy_tensor, laid_out, preamble
from dora.weights.reference import TensorHeader
from dora.weights.tied_head import placed_tensors

if TYPE_CHECKING:
    from dora.client.device_image import Image, Images

SPARE_FILE: Final = ".spare"
RECYCLED_FOLDER: Final = "spare"  # folder of a store with files of retired versions, to overwrite
_PIECE_BYTES: Final = 4 << 20
_POPULATE: Final = getattr(mmap, "MAP_POPULATE", 0)


@dataclass(frozen=True, slots=True)
class Spare:
    """A file with allocated space and mapped pages. ``file`` has a hidden name until it is used."""

    file: Path
    room: mmap.mmap

    @classmethod
    def made(cls, folder: Path, file_bytes: int, recycled: Path | None = None) -> Self:
        """Creates it in ``folder``, from a recycled file if there is one. Raises OSError if there is no room."""
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / SPARE_FILE
        if recycled is not None:
            with suppress(OSError):
                os.rename(recycled, file)
        return cls(file, _room(file, file_bytes))


class Taken:
    """Complete copies of files that have no more writers. They stay readable if their folder is removed."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._open: dict[str, int] = {}
        self.identities: tuple[WeightFile, ...] = ()  # set by examine
        self.image: Image | None = None  # of the one file, on the trainer's GPU
        try:
            for name in names:
                self._open[name] = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self.close()
            raise

    def examine(self) -> tuple[WeightFile, ...]:
        """Reads all files once for their sizes and hashes. Raises InvalidValue for a tensor that is not finite."""
        self.identities = tuple(
            replace(examine_file(Path(f"/proc/self/fd/{opened}")).identity, name=name)
            for name, opened in self._open.items()
        )
        if self.image is not None:
            self.image.check(*self.mapped().values())
        return self.identities

    def bring(self, folder: Path) -> None:
        """Ensures that the files are in ``folder``, and offers their image there. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, opened in self._open.items():
            target = folder / name
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(opened), target.stat()):
                    continue
            with open(f"/proc/self/fd/{opened}", "rb") as source, open(target, "wb", opener=_private) as copy:
                shutil.copyfileobj(source, copy, _PIECE_BYTES)
        if self.image is not None:
            self.image.offer(folder, *self.identities)

    def descriptor(self, name: str) -> int:
        """A descriptor that reads the file until :meth:`close`, even if it is moved or removed."""
        return self._open[name]

    def paths(self) -> dict[str, Path]:
        """Paths that read the files until :meth:`close`, even if they are moved or removed."""
        return {name: Path(f"/proc/self/fd/{opened}") for name, opened in self._open.items()}

    def remove(self, folder: Path) -> None:
        for name in self._open:
            (folder / name).unlink(missing_ok=True)

    def mapped(self) -> dict[str, memoryview]:
        """The files' contents, mapped read-only."""
        return {name: memoryview(mmap.mmap(opened, 0, prot=mmap.PROT_READ)) for name, opened in self._open.items()}

    def close(self) -> None:
        """Closes the files. May be repeated."""
        for opened in self._open.values():
            os.close(opened)
        self._open = {}


def take_tensors(
    tensors: Iterable[tuple[str, Any]],
    headers: Mapping[str, TensorHeader],
    folder: Path,
    name: str,
    spare: Spare | None = None,
    images: "Images | None" = None,
) -> Taken:
    """Copies ``tensors``, by name, into ``folder / name``, each once and in the dtype of its header; into an image too.

    Raises InvalidValue if numpy lacks the dtype, OSError if there is no room. After an error no file is left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ordered = laid_out(headers.values())
    head = preamble(ordered)
    file_bytes = len(head) + sum(header.content_bytes for header in ordered)
    file, unfinished = folder / name, folder / f".{name}"
    image = images.begin(file_bytes - len(head)) if images is not None else None
    try:
        room = _take_spare(spare, unfinished, file_bytes)
        if room is None:
            unfinished.unlink(missing_ok=True)
            room = _room(unfinished, file_bytes)
        room[: len(head)] = head
        offset, places = len(head), {}
        for header in ordered:
            places[header.name] = offset
            offset += header.content_bytes
        for each, tensor in tensors:
            copy_tensor(tensor, headers[each], room, places[each])
            if image is not None:
                image.copy(tensor, headers[each], places[each] - len(head))
        os.rename(unfinished, file)
    except (InvalidValue, OSError):
        unfinished.unlink(missing_ok=True)
        raise
    taken = Taken(folder, [name])
    if image is not None:
        image.finish()
        taken.image = image
    return taken


def take_files(paths: Sequence[Path], folder: Path, without: str = "") -> Taken:
    """Copies files into ``folder``, without the tensor ``without``. Raises OSError; then no file is left."""
    folder.mkdir(parents=True, exist_ok=True)
    targets: list[Path] = []
    try:
        for path in paths:
            placed = placed_tensors([path]) if without else {}
            if [*placed] == [without]:
                continue
            targets.append(folder / path.name)
            targets[-1].unlink(missing_ok=True)
            with path.open("rb") as source, open(targets[-1], "wb", opener=_private) as copy:
                if placed.pop(without, None) is None:
                    shutil.copyfileobj(source, copy, _PIECE_BYTES)
                    continue
                ordered = laid_out(tensor for _, _, tensor in placed.values())
                copy.write(preamble(ordered))
                for tensor in ordered:
                    source.seek(placed[tensor.name][1])
                    for at in range(0, tensor.content_bytes, _PIECE_BYTES):
                        copy.write(source.read(min(_PIECE_BYTES, tensor.content_bytes - at)))
    except OSError:
        for target in targets:
            target.unlink(missing_ok=True)
        raise
    return Taken(folder, [target.name for target in targets])


def _take_spare(spare: Spare | None, unfinished: Path, file_bytes: int) -> mmap.mmap | None:
    if spare is None or len(spare.room) < file_bytes:
        return None
    try:
        os.rename(spare.file, unfinished)
        os.truncate(unfinished, file_bytes)
    except OSError:
        return None
    return spare.room


def _private(path: str, flags: int) -> int:
    """Creates a file for this user alone, in a process that keeps its own umask."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _room(file: Path, file_bytes: int) -> mmap.mmap:
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, file_bytes)
        os.posix_fallocate(descriptor, 0, file_bytes)
        return mmap.mmap(descriptor, file_bytes, mmap.MAP_SHARED | _POPULATE)
    except OSError:
        file.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
