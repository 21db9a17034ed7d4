"""What a relay has of one version: all of it, or the chunks that have come so far, in the order in which they came."""

import mmap
import threading
from collections.abc import Sequence
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

TAG_BYTES: Final = 16  # of a chunk between hosts: BLAKE3 under the secret of the run


class Holding:
    """One thread adds what comes; others wait for it, and pass it on."""

    def __init__(self, store: HostStore, manifest: Manifest, receiving: Receiving | None = None) -> None:
        """Without ``receiving`` the store has the version whole. What a ``receiving`` has by now counts as come."""
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
        """Whether the store has sealed it."""
        return self.receiving is None

    @property
    def is_ended(self) -> bool:
        return bool(self._ended)

    def lacked(self) -> list[int]:
        """The chunks that have not come, ascending."""
        if self.receiving is None:
            return []
        return [self.numbering.number(file, index) for file, index in self.receiving.missing()]

    def add(self, number: int, tag: bytes = b"") -> None:
        """A chunk has come and was checked. ``tag``: what it came with, to be passed on."""
        with self._changed:
            if tag:
                self._tags[number] = tag
            self._come.append(number)
            self._changed.notify_all()

    def seal(self) -> None:
        """Makes the version visible in the store: all chunks have come.

        Raises as ``Receiving.seal``, and the holding is ended then: what has come is thrown away.
        """
        if self.receiving is not None:
            try:
                self.receiving.seal()
            except (InvalidValue, OSError) as error:
                self.end(f"{self.manifest.name} was not taken into the store: {error}")
                raise
            self.receiving = None

    def end(self, reason: str) -> None:
        """It is given up: who waits for more of it is told why. What has come is thrown away unless it is sealed."""
        with self._changed:
            self._ended = reason
            self._changed.notify_all()
        if self.receiving is not None:
            self.receiving.close()

    def wait(self, after: int, timeout_s: float) -> Sequence[int]:
        """What has come beyond the first ``after`` chunks, in order; nothing where the time is over before more comes.

        Raises TransferFailed where the version is given up.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ended or len(self._arrived) > after, timeout_s)
            if self._ended:
                raise TransferFailed(self._ended)
            return self._arrived[after:]  # of its own: ``add`` goes on

    def tag(self, number: int, content: memoryview, secret: bytes) -> bytes:
        """The tag of a chunk: as it came, or made now and kept."""
        found = self._tags.get(number)
        if found is None:
            found = self._tags[number] = tag_of(content, secret)
        return found

    def reader(self) -> "Reader":
        """Shows chunks, and keeps the version's files until its end."""
        return Reader(self, self._store)


class Reader:
    """The chunks of a holding, for one thread; a context, within which the store keeps them."""

    def __init__(self, holding: Holding, store: HostStore) -> None:
        self._holding = holding
        self._store = store
        self._stack = ExitStack()
        self._maps: dict[str, mmap.mmap] = {}
        self._folder: Path | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._maps.clear()
        self._stack.close()

    def chunk(self, number: int) -> memoryview:
        """The bytes of a chunk that has come. Raises TransferFailed where the version is gone."""
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


def tag_of(content: memoryview, secret: bytes) -> bytes:
    return blake3(content, key=secret).digest(TAG_BYTES)
