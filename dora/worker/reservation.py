"""An engine's reservation for an arriving request: a slot unless it is kept, and blocks of its KV-cache."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from dora.data.types import RequestSpec
from dora.errors import SnapshotRefused
from dora.kvtransfer.codec import Opening, opening_in
from dora.kvtransfer.device import DeviceMemory, OnDevice
from dora.kvtransfer.snapshot import NO_PREFIX, KvLayout, Pieces, Prefix
from dora.worker.prefixes import Prefixes

SLICE_BYTES: Final = 1 << 20  # bytes written at once to host memory, which bounds the engine's wait for the blocks
MARGIN_BLOCKS: Final = 2  # beyond what the request fills when it is asked for: it decodes while it is copied


class KvBlocks(Protocol):
    """Blocks of an engine's KV-cache by id, with one list of ids for each group of layers."""

    @property
    def slice_bytes(self) -> int:
        """About how many bytes to write at once."""

    def show(self, block_ids: Sequence[Sequence[int]]) -> dict[str, list[np.ndarray]]:
        """Returns some blocks of every layer in the order of its group's ids.

        Raises TransferFailed if they must be copied and there is no memory for it.
        """

    def write(self, block_ids: Sequence[Sequence[int]], blocks: Mapping[str, Pieces]) -> None:
        """Overwrites some blocks of every layer."""


class KvStore(KvBlocks, Protocol):
    """The whole KV-cache of an engine."""

    @property
    def layers(self) -> tuple[tuple[str, int], ...]:
        """(layer name, bytes per block), sorted by name."""

    @property
    def orders(self) -> tuple[str, ...]:
        """The axis orders inside the layers' blocks, if they can differ between engines."""

    @property
    def device_memory(self) -> DeviceMemory | None:
        """Memory on the engine's device for KV straight from another one, or None if KV passes through the host."""

    def lend(self, block_ids: Sequence[Sequence[int]]) -> Mapping[str, Pieces]:
        """Returns some blocks as ``show`` does, but where they are: they must not change while they are read."""

    def join(self) -> None:
        """Makes the engine's next step see all earlier writes."""


class PreparedOpening(NamedTuple):
    """The part of a request that came before its snapshot, and the engine's preparation of it."""

    opening: Opening
    made: Any


class Reservation:
    """An engine's reservation for one request. Without blocks, arriving KV is kept in host memory.

    There are blocks only if all layers have one group and none has a window.

    The engine's thread creates and closes it. In between any one thread writes blocks beside the engine's steps, which
    use them only after the request was taken in. That thread also prepares the request for the engine, so that taking
    it in costs the same for any length.
    """

    def __init__(
        self,
        layout: KvLayout,
        block_ids: Sequence[int],
        store: KvBlocks,
        make: Callable[[Opening], Any],
        prefixes: Prefixes | None = None,
    ) -> None:
        """``make`` raises SnapshotRefused for a request that cannot be taken in; any thread may call it.

        ``prefixes`` are the engine's, if its requests can share blocks.
        """
        self.own_ids = block_ids  # reserved blocks
        self.shared_ids: tuple[int, ...] = ()  # the request's first blocks, if it shares them with another one
        self.prefix = NO_PREFIX  # which was claimed for them
        self.offered = ""  # key of the first round, where others may share what it has brought
        self.takes_slot = True  # set by the engine
        self.written = 0  # blocks, from the first one on; with those that are shared
        self._prefixes = prefixes
        self._key = ""  # of the first round
        self._is_barred = False  # others share its blocks, so nothing more is written
        self._begun: PreparedOpening | None = None
        self._layout = layout
        self._store = store
        self._make = make
        self._is_open = True
        self._lock = threading.Lock()

    @property
    def has_blocks(self) -> bool:
        return bool(self.own_ids)

    @property
    def block_ids(self) -> list[int]:
        """The blocks in the request's order, more than it needs."""
        return [*self.shared_ids, *self.own_ids]

    @property
    def opening(self) -> Opening | None:
        """The opening from the latest ``begin``."""
        return None if self._begun is None else self._begun.opening

    def start(self, key: str, prefix: Prefix) -> None:
        """Starts a first round and voids earlier ones. Raises SnapshotRefused if the prefix is not here."""
        with self._lock:
            if not self._is_open:
                raise SnapshotRefused("it is no longer expected")
            if self._prefixes is not None:
                self._is_barred = not self._prefixes.withdraw(self.offered)
                self.offered = self.offered if self._is_barred else ""
                self._prefixes.give_up(self.prefix)
            self._key, self.prefix, self.shared_ids, self.written = key, NO_PREFIX, (), 0
            if not prefix.blocks:
                return
            if self._prefixes is None or not self.own_ids:
                raise SnapshotRefused(f"prefix of {prefix.blocks} blocks: no blocks are kept here")
            self.shared_ids = self._prefixes.claim(prefix)
            self.prefix, self.written = prefix, prefix.blocks

    def begin(self, head: bytes) -> Opening:
        """Reads the opening of a snapshot, which came with its first round. Raises SnapshotRefused."""
        self._begun = None
        opening = opening_in(head)
        if opening.prefix != self.prefix.blocks or (opening.prefix and opening.layout != self._layout):
            raise SnapshotRefused(f"prefix = {opening.prefix} blocks, {self.prefix.blocks} of this engine's were named")
        self._begun = PreparedOpening(opening, self._make(opening))
        return opening

    def begun_with(self, request: RequestSpec) -> PreparedOpening | None:
        """Returns the preparation of this request, or None if there is none or it has another opening."""
        begun = self._begun
        if begun is None or request.prompt_token_ids is not begun.opening.request.prompt_token_ids:
            return None
        if request.inputs != begun.opening.request.inputs:  # it was extended while it was copied
            return None
        return begun

    def show(self, count: int) -> dict[str, list[np.ndarray]]:
        return self._store.show([self.block_ids[:count]])

    def write(self, first_bytes: int, body: np.ndarray | OnDevice) -> bool:
        """Writes a round of whole blocks after the first ``first_bytes``.

        Returns False if it has no room here, the reservation is closed, or the blocks' layout differs or is unknown.

        ``body`` has the blocks of the first layer, then those of the second, in the layout's order.
        """
        first, odd = divmod(first_bytes, self._layout.block_bytes)
        count, more = divmod(body.nbytes, self._layout.block_bytes)
        shared = len(self.shared_ids)
        if self.opening is None or self.opening.layout != self._layout:
            return False
        if odd or more or shared + first > self.written or first + count > len(self.own_ids) or self._is_barred:
            return False
        layers: dict[str, np.ndarray | OnDevice] = {}
        at = 0
        for name, block_bytes in self._layout.layers:
            layers[name] = body[at : at + count * block_bytes].reshape(count, block_bytes)
            at += count * block_bytes
        self.written = shared + first
        step = max(1, self._store.slice_bytes // self._layout.block_bytes)
        for begin in range(0, count, step):
            with self._lock:
                if not self._is_open:
                    return False
                end = min(begin + step, count)
                block_ids = self.own_ids[first + begin : first + end]
                self._store.write([block_ids], {name: [rows[begin:end]] for name, rows in layers.items()})
        self.written = shared + first + count
        with self._lock:
            if self._is_open and not shared and self._key and self._prefixes is not None:
                self._prefixes.offer(self._key, self.own_ids[: self.written])
                self.offered = self._key
        return True

    def close(self) -> None:
        """Closes the reservation; no write follows."""
        with self._lock:
            self._is_open = False
