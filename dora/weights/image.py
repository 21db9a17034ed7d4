"""A version's weights in the memory of the trainer's GPU, where engines of its host read them instead of the file.

    trainer   weights ──▶ file and image ── their checksums agree ──▶ note beside the file
    engine    note, locked ──▶ image ──▶ memory of its own ── the note's checksums ──▶ model

The note is a file in the version's folder. An engine locks it while it reads the image. The trainer empties it under
the exclusive lock before it overwrites the image; if an engine reads then, the next version has no image. The kernel
releases the locks of a process that ends. Every version has its file, which an engine loads if there is no note, or if
it refuses the image.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dora.errors import Conflict

NOTE_FILE: Final = "dora-image.json"
NOTE_BYTES_MAX: Final = 16 << 20
SUM_BYTES: Final = 16  # of one tensor (dora.weights.words)

Place = Mapping[str, str | int]  # of an image; its adapter knows the fields


class ImageRefused(Conflict):
    """An image does not hold what its note says, or cannot be read here. The version's file is loaded instead."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"image: {field}", value, allowed)


@dataclass(frozen=True, slots=True)
class ImageNote:
    """An image's note: ``blake3`` of the version's one file, in hexadecimal; ``sums`` of its tensors in file order."""

    place: Place
    blake3: str
    image_bytes: int
    sums: tuple[bytes, ...]

    def text(self) -> str:
        sums = b"".join(self.sums).hex()
        return json.dumps(
            {"place": dict(self.place), "blake3": self.blake3, "image_bytes": self.image_bytes, "sums": sums}
        )


def write_note(folder: Path, note: ImageNote) -> int:
    """Writes the note of a version whose file is in ``folder``. Returns a descriptor of it for ``void``."""
    unfinished = folder / f".{NOTE_FILE}"
    descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        content = memoryview(note.text().encode())
        while content:
            content = content[os.write(descriptor, content) :]
        os.rename(unfinished, folder / NOTE_FILE)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def void(descriptor: int) -> bool:
    """Empties a note, so that nobody begins to read its image. Returns False, without a change, if an engine reads."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    try:
        os.ftruncate(descriptor, 0)
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    return True


@contextmanager
def noted(folder: Path) -> Iterator[ImageNote | None]:
    """Yields the note of the version in ``folder``, whose image stays as it is within the context; or None.

    Raises ImageRefused for a note that no trainer has written.
    """
    try:
        descriptor = os.open(folder / NOTE_FILE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        yield None
        return
    try:
        yield _read(descriptor) if _is_locked(descriptor) else None
    finally:
        os.close(descriptor)


def _is_locked(descriptor: int) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return True
    return False


def _read(descriptor: int) -> ImageNote | None:
    size_bytes = os.fstat(descriptor).st_size
    if not size_bytes:
        return None
    if size_bytes > NOTE_BYTES_MAX:
        raise ImageRefused("note", f"{size_bytes} bytes", f"at most {NOTE_BYTES_MAX}")
    try:
        found: dict[str, Any] = json.loads(os.pread(descriptor, size_bytes, 0))
        place, sums = found["place"], bytes.fromhex(found["sums"])
        note = ImageNote(
            place,
            str(found["blake3"]),
            found["image_bytes"],
            tuple(sums[at : at + SUM_BYTES] for at in range(0, len(sums), SUM_BYTES)),
        )
        fits = isinstance(place, dict) and isinstance(note.image_bytes, int) and not len(sums) % SUM_BYTES
    except (ValueError, TypeError, KeyError) as error:
        raise ImageRefused("note", str(error), "one that a trainer wrote") from error
    if not fits or any(not isinstance(each, str | int) for each in place.values()):
        raise ImageRefused("note", "other types", "one that a trainer wrote")
    return note
