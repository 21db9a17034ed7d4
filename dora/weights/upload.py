"""One weights file on its way into the store, in pieces."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from dora.errors import Conflict, InvalidValue


class Upload:
    """One file on its way in, under a hidden name. As a context manager it leaves a whole file or none."""

    def __init__(self, file: Path, file_bytes: int, ended: Callable[[Path], None]) -> None:
        """``ended`` is told of the file at the end."""
        self._file = file
        self._unfinished = file.with_name(f".{file.name}")
        self._expected_bytes = file_bytes
        self._ended = ended
        self._stream = self._unfinished.open("wb", buffering=0)

    def append(self, content: bytes) -> None:
        """Raises InvalidValue for more bytes than were announced, OSError where they cannot be written."""
        if self._stream.tell() + len(content) > self._expected_bytes:
            raise InvalidValue("file_bytes", f"more than {self._expected_bytes}", "the size in the upload's header")
        rest = memoryview(content)
        while rest:
            rest = rest[self._stream.write(rest) :]

    def finish(self) -> int:
        """The file's bytes. Raises InvalidValue where fewer came than were announced, or its trainer was fenced."""
        received_bytes = self._stream.tell()
        if received_bytes != self._expected_bytes:
            raise InvalidValue("file_bytes", received_bytes, f"the size in the upload's header, {self._expected_bytes}")
        self._stream.close()
        try:
            os.rename(self._unfinished, self._file)
        except FileNotFoundError as error:
            allowed = "of the trainer that attached last, before its commit"
            raise Conflict("upload", self._file.name, allowed, why="came too late") from error
        return received_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()
        with suppress(OSError):  # a file system that cannot be written any more: the next start sweeps it
            self._unfinished.unlink(missing_ok=True)
        self._ended(self._file)
