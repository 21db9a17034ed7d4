"""A relay's copy of one version: complete, or the chunks received so far in their order of arrival."""

import mmap
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from blake3 import blake3

from dora.errors import Conflict, InvalidValue, TransferFailed
from dora.relay.numbering import Numbering
from dora.weights.holds import held
from dora.weights.host_store import HostStore
from dora.weights.manifest import Manifest
from dora.weights.receiving import Receiving

TAG_BYTES: Final = 16  # of a chunk between hosts: BLAKE3 keyed with the run's secret


class Holding:
    """A version as it arrives. One thread adds chunks; other threads wait for them and pass them on."""

    def __init__(self, store: HostStore, manifest: Manifest, receiving: Receiving | None = None) -> None:
        """Without ``receiving`` the store has the whole version. Chunks already in ``receiving`` count as received."""
        self.manifest = manifest
        self.numbering = Numbering(manifest)
        self.receiving = receiving
        self._store = store
        self._tags: dict[int, bytes] = {}
        self._arrived: Sequence[int] = range(self.numbering.chunks)
        self._come: list[int] = []
        self._ended = ""
        self._changed = threading.Condition()
        if receiving is not None:
            lacking = {self.numbering.number(file, index) for file, index in receiving.missing()}
            self._come = [number for number in range(self.numbering.chunks) if number not in lacking]
            self._arrived = self._come

    @property
    def is_whole(self) -> bool:
        return self.receiving is None

    @property
    def is_ended(self) -> bool:
        return bool(self._ended)

    def lacked(self) -> list[int]:
        if self.receiving is None:
            return []
        return [self.numbering.number(file, index) for file, index in self.receiving.missing()]

    def add(self, number: int, tag: bytes = b"") -> None:
        """Enters a received and checked chunk. Its ``tag`` is passed on with it."""
        with self._changed:
            if tag:
                self._tags[number] = tag
            self._come.append(number)
            self._changed.notify_all()

    def seal(self) -> None:
        """Makes the version visible in the store once all chunks have come.

        Raises as ``Receiving.seal`` does; the holding is then ended and its chunks are discarded.
        """
        if self.receiving is not None:
            try:
                self.receiving.seal()
            except (InvalidValue, OSError) as error:
                self.end(f"{self.manifest.name} was not taken into the store: {error}")
                raise
            self.receiving = None

    def end(self, reason: str) -> None:
        """Abandons the version. Waiting threads get the reason. Chunks are discarded unless it is sealed."""
        with self._changed:
            self._ended = reason
            self._changed.notify_all()
        if self.receiving is not None:
            self.receiving.close()

    def wait(self, after: int, timeout_s: float) -> Sequence[int]:
        """Returns the chunks after the first ``after``; none after the timeout. Raises TransferFailed if abandoned."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or len(self._arrived) > after, timeout_s)
            if self._ended:
                raise TransferFailed(self._ended, "version", self.manifest.name)
            return self._arrived[after:]  # a copy: ``add`` continues

    def tag(self, number: int, content: memoryview, secret: bytes) -> bytes:
        """Returns a chunk's tag: as received, or computed now and kept."""
        found = self._tags.get(number)
        if found is None:
            found = self._tags[number] = tag_of(content, secret)
        return found

    def reader(self) -> "Reader":
        """Returns a reader, which keeps the version's files until it ends."""
        return Reader(self, self._store)


class Reader:
    """The chunks of a holding, for one thread. The store keeps them while this context is open."""

    def __init__(self, holding: Holding, store: HostStore) -> None:
        self._holding = holding
        self._store = store
        self._stack = ExitStack()
        self._maps: dict[str, mmap.mmap] = {}
        self._folder: Path | None = None

    def __enter__(self) -> Self:
        """Holds the version if it is complete. Raises TransferFailed if it was removed or cannot be read."""
        with ExitStack() as failing:
            failing.callback(self._stack.close)
            for file in self._holding.manifest.files if self._holding.is_whole else ():
                self._map(file.name)
            failing.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._maps.clear()
        self._stack.close()

    def chunk(self, number: int) -> memoryview:
        """Returns the bytes of a received chunk. Raises TransferFailed if the version was removed."""
        file, index = self._holding.numbering.place(number)
        receiving = self._holding.receiving
        if receiving is not None:
            try:
                return receiving.chunk(file, index)
            except Conflict:  # sealed meanwhile, or given up
                pass
        offset, length = self._holding.manifest.file(file).chunk(index)
        return memoryview(self._map(file))[offset : offset + length]

    def _map(self, file: str) -> mmap.mmap:
        if file not in self._maps:
            manifest = self._holding.manifest
            try:
                if self._folder is None:
                    self._folder = self._stack.enter_context(held(self._store.root, manifest.name, "relay"))
                with (self._folder / file).open("rb") as stream:
                    self._maps[file] = mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ)
            except (InvalidValue, OSError, ValueError) as error:
                raise TransferFailed(f"{manifest.name} is held no longer: {error}") from error
        return self._maps[file]


Find = Callable[[str, float], Holding | None]  # the local copy of a named version; waits up to so many seconds


def tag_of(content: memoryview, secret: bytes) -> bytes:
    return blake3(content, key=secret).digest(TAG_BYTES)
