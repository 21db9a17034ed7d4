"""Uploads one weights file into the store, in pieces."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from dora.errors import Conflict, InvalidValue
from dora.weights.delta import decode

_PIECE_BYTES_MAX: Final = 1 << 31


class Upload:
    """One incoming file, under a hidden name. As a context manager it leaves a complete file or none."""

    def __init__(self, file: Path, file_bytes: int, ended: Callable[[Path], None]) -> None:
        self._file = file
        self._unfinished = file.with_name(f".{file.name}")
        self._expected_bytes = file_bytes
        self._ended = ended
        self._stream = self._unfinished.open("wb", buffering=0)

    def append(self, content: bytes) -> None:
        """Appends bytes. Raises InvalidValue for more than announced, OSError if they cannot be written."""
        if self._stream.tell() + len(content) > self._expected_bytes:
            raise InvalidValue("file_bytes", f"more than {self._expected_bytes}", "the size in the upload's header")
        rest = memoryview(content)
        while rest:
            rest = rest[self._stream.write(rest) :]

    def finish(self) -> int:
        """Completes the file and returns its size. Raises InvalidValue if bytes are missing or its trainer fenced."""
        received_bytes = self._stream.tell()
        if received_bytes != self._expected_bytes:
            raise InvalidValue("file_bytes", received_bytes, f"{self._expected_bytes}, the size in the upload's header")
        self._stream.close()
        try:
            os.rename(self._unfinished, self._file)
        except FileNotFoundError as error:
            allowed = "from the trainer that attached last, before its commit"
            raise Conflict("upload", self._file.name, allowed, why="came too late") from error
        return received_bytes

    @property
    def received_bytes(self) -> int:
        return self._stream.tell()

    @property
    def expected_bytes(self) -> int:
        return self._expected_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()
        with suppress(OSError):  # an unwritable file system: the next start sweeps it
            self._unfinished.unlink(missing_ok=True)
        self._ended(self._file)


class DeltaUpload(Upload):
    """One file sent as a delta against another one, in pieces of the same length (delta.py)."""

    def __init__(
        self, file: Path, file_bytes: int, ended: Callable[[Path], None], base: Path, piece_bytes: int
    ) -> None:
        """Opens ``base``, which may be removed afterwards. Raises OSError, and InvalidValue for a bad piece length."""
        if not 0 < piece_bytes <= _PIECE_BYTES_MAX:
            raise InvalidValue("piece_bytes", piece_bytes, f"1 to {_PIECE_BYTES_MAX}")
        self._base = os.open(base, os.O_RDONLY | os.O_CLOEXEC)
        try:
            super().__init__(file, file_bytes, ended)
        except BaseException:
            os.close(self._base)
            raise
        self._piece_bytes = piece_bytes

    def append(self, content: bytes) -> None:
        """Appends one encoded piece; an empty one is ignored. Raises InvalidValue for a bad one, and as ``Upload``."""
        if not content:
            return
        offset = self.received_bytes
        length = min(self._piece_bytes, self.expected_bytes - offset)
        if not length:
            raise InvalidValue("file_bytes", f"more than {self.expected_bytes}", "the size in the upload's header")
        super().append(decode(content, os.pread(self._base, length, offset), length))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._base)
        super().__exit__(kind, error, trace)
