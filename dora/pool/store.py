"""The snapshots of a pool, and its behaviour when it is full.

- Bodies stay in the arena, where they arrived. A request is admitted only if its KV fits beside the stored snapshots
  and the earlier admissions.
- If memory is full and the disk has room, the oldest snapshots are written to disk by a thread, and a new request is
  admitted once there is room. If both are full, it is refused.
- A snapshot that cannot be written is dropped. The oldest is also dropped if a request waits for the disk longer than
  ``WAIT_S``. Drops are reported, and their requests are re-prefilled.
- A snapshot on disk is read back when it is sent on (``disk``). If it cannot be read, it is lost.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from dora.data.input_digest import beginning_digest, input_digest
from dora.errors import Conflict, SnapshotRefused, TransferFailed
from dora.kvtransfer.copying import NotMovable
from dora.kvtransfer.endpoint import ReserveOrder, SnapshotRoom
from dora.kvtransfer.peer import Peer
from dora.kvtransfer.plane import ArrivedSnapshot
from dora.kvtransfer.transports.arena import Arena
from dora.pool.disk import Disk
from dora.pool.parked import Bodies, Parked, ParkedRound
from dora.pool.rounds import ParkedRounds

log = logging.getLogger("dora.worker")

WAIT_S: Final = 2.0  # for a disk


@dataclass(slots=True, eq=False)
class _Waiting:
    request_id: str
    kv_bytes: int
    since_s: float
    done: "Future[None]"


@dataclass(frozen=True, slots=True)
class PoolContents:
    parked: int
    memory_bytes: int
    spill_bytes: int
    spilled: int  # snapshots written to disk so far


class Store:
    """The snapshots of one pool. Thread-safe."""

    def __init__(
        self,
        arena: Arena,
        disk: Disk | None,
        secret: bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``secret`` is the run's, for keyed checksums."""
        self._arena = arena
        self._disk = disk
        self._secret = secret
        self._clock = clock
        self._parked: dict[str, Parked] = {}  # the one that has lain longest first
        self._let_in: dict[str, int] = {}  # bytes that are expected
        self._waiting: deque[_Waiting] = deque()
        self._dropped: list[tuple[str, str]] = []
        self._spilled = 0
        self._lock = threading.RLock()

    def reserve(self, order: ReserveOrder) -> SnapshotRoom:
        """Reserves room for a request. The room is granted once there is enough.

        Raises Conflict if there can be no room or the request is already here. Raises SnapshotRefused if the system has
        no memory; a grant may fail with it too.
        """
        request_id = order.request_id
        with self._lock:
            if request_id in self._parked:
                raise Conflict("request_id", request_id, "a request that is not parked here", why="is parked here")
            self.release(request_id)
            waiting = _Waiting(request_id, order.kv_bytes, self._clock(), Future())
            self._waiting.append(waiting)
            self._make_room()
            if waiting.done.done():
                waiting.done.result()
            return SnapshotRoom(order.most_bytes, granted=waiting.done)

    def release(self, request_id: str) -> None:
        with self._lock:
            self._let_in.pop(request_id, None)
            for waiting in [each for each in self._waiting if each.request_id == request_id]:
                self._waiting.remove(waiting)
                waiting.done.set_exception(TransferFailed("it was cancelled"))
            self._make_room()

    def parked(self) -> dict[str, int]:
        with self._lock:
            return {request_id: parked.tokens for request_id, parked in self._parked.items()}

    def input_digests(self) -> dict[str, bytes]:
        with self._lock:
            return {name: parked.input_digest for name, parked in self._parked.items() if parked.input_digest}

    def accept(self, arrived: ArrivedSnapshot, row: int) -> None:
        request, rounds = arrived.snapshot.request, arrived.rounds
        known = tuple(ParkedRound(each.seal, each.body.nbytes) for each in rounds)
        bodies = [np.asarray(each.body) for each in rounds]  # a pool has no device
        outputs = request.output_token_ids
        beginning = beginning_digest(request.prompt_token_ids) if request.keeps else b""
        digest = input_digest(beginning, request.sampling, outputs, request.inputs)
        parked = Parked(request.request_id, len(outputs), arrived.head, known, bodies, digest)
        with self._lock:
            self._let_in.pop(request.request_id, None)
            self._parked[request.request_id] = parked

    def remove(self, request_id: str) -> None:
        """Removes a request's KV. Unknown ids are ignored."""
        with self._lock:
            parked = self._parked.get(request_id)
            if parked is not None:
                self._forget(parked)
            self.release(request_id)

    def thaw(self, request_id: str) -> None:
        """Does nothing: a pool does not decode."""

    def rounds_of(self, request_id: str, peer: Peer) -> ParkedRounds:
        """Returns a snapshot's rounds as they came. It is read back from disk if needed and kept in memory until they
        are closed.

        Raises NotMovable if it is not here. Opening may raise NotMovable too, or TransferFailed if it may succeed
        later.
        """
        opened: Future[Bodies] = Future()
        with self._lock:
            parked = self._parked.get(request_id)
            if parked is None:
                raise NotMovable(f"{request_id} is not parked here, or not any more")
            parked.readers += 1
            if parked.bodies:
                opened.set_result(parked.bodies)
            else:
                assert self._disk is not None
                self._disk.read(parked, opened, partial(self._read, parked))
        return ParkedRounds(parked, opened, self._secret, partial(self._read, parked))

    def drop(self, parked: Parked, reason: str) -> None:
        with self._lock:
            if self._parked.get(parked.request_id) is parked:
                self._forget(parked)
                self._dropped.append((parked.request_id, reason))
                log.warning("pool: %s is dropped: %s", parked.request_id, reason)
            self._make_room()

    def dropped(self) -> list[tuple[str, str]]:
        """Returns the requests dropped since the last call, with their reasons."""
        with self._lock:
            found, self._dropped = self._dropped, []
            return found

    def look(self) -> None:
        """Drops the oldest snapshot if a request has waited too long for the disk."""
        with self._lock:
            while self._waiting and self._clock() - self._waiting[0].since_s > WAIT_S:
                oldest = next((each for each in self._parked.values() if each.is_idle), None)
                if oldest is None:
                    self._refuse(self._waiting.popleft())
                else:
                    self.drop(oldest, f"the disk took longer than {WAIT_S:g} s for others")

    def held(self) -> PoolContents:
        with self._lock:
            return PoolContents(len(self._parked), self._arena.lent_bytes(), self._spill_bytes(), self._spilled)

    def close(self) -> None:
        if self._disk is not None:
            self._disk.close()
        with self._lock:
            self._parked.clear()

    # -------------------------------------------------------------------------------------------------- under the lock

    def _room_bytes(self) -> int:
        used = sum(parked.memory_bytes for parked in self._parked.values()) + sum(self._let_in.values())
        return self._arena.most_bytes - used

    def _spill_bytes(self) -> int:
        return sum(each.size_bytes for each in self._parked.values() if each.file is not None or each.is_writing)

    def _make_room(self) -> None:
        while self._waiting and self._waiting[0].kv_bytes <= self._room_bytes():
            first = self._waiting.popleft()
            try:
                self._arena.prepare(self._arena.most_bytes - self._room_bytes() + first.kv_bytes)
            except SnapshotRefused as error:
                first.done.set_exception(error)
                continue
            self._let_in[first.request_id] = first.kv_bytes
            first.done.set_result(None)
        while self._waiting:
            lacking = sum(each.kv_bytes for each in self._waiting) - self._room_bytes()
            lacking -= sum(each.memory_bytes for each in self._parked.values() if each.is_writing)
            if lacking <= 0 or self._begin_writing(lacking):
                return
            self._refuse(self._waiting.pop())

    def _begin_writing(self, lacking_bytes: int) -> bool:
        """Starts to write the oldest snapshots to disk. Returns False, and starts none, if they do not free enough."""
        if self._disk is None:
            return False
        chosen: list[Parked] = []
        left_bytes = self._disk.most_bytes - self._spill_bytes()
        for parked in self._parked.values():
            if lacking_bytes <= 0:
                break
            if parked.is_idle and parked.size_bytes <= left_bytes:
                chosen.append(parked)
                lacking_bytes -= parked.memory_bytes
                left_bytes -= parked.size_bytes
        if lacking_bytes > 0:
            return False
        for parked in chosen:
            parked.is_writing = True
            self._disk.write(parked, partial(self._is_for_disk, parked), partial(self._written, parked))
        return True

    def _refuse(self, waiting: _Waiting) -> None:
        held = self.held()
        on_disk = f" and {held.spill_bytes:,} of {self._disk.most_bytes:,} on disk" if self._disk else ""
        used_bytes = self._arena.most_bytes - self._room_bytes()
        allowed = f"what fits beside {used_bytes:,} of {self._arena.most_bytes:,}{on_disk}"
        waiting.done.set_exception(
            Conflict("kv_bytes", waiting.kv_bytes, allowed, why="is more than there is room for")
        )

    def _settle(self, parked: Parked) -> None:
        is_kept = self._parked.get(parked.request_id) is parked
        if not parked.readers and (parked.file is not None or not is_kept):
            parked.bodies = ()
            self._make_room()

    def _forget(self, parked: Parked) -> None:
        del self._parked[parked.request_id]
        self._settle(parked)
        self._remove_file(parked)

    def _remove_file(self, parked: Parked) -> None:
        if parked.file is not None and self._disk is not None:
            self._disk.remove(parked.file)
            parked.file = None

    # ---------------------------------------------------------------------------------------------- the disk's thread

    def _is_for_disk(self, parked: Parked) -> bool:
        with self._lock:
            return self._parked.get(parked.request_id) is parked and not parked.readers

    def _written(self, parked: Parked, file: Path | None, failure: str) -> None:
        with self._lock:
            parked.is_writing, parked.file = False, file
            if failure:
                self.drop(parked, failure)
            elif file is None:
                self._make_room()
            else:
                if self._parked.get(parked.request_id) is not parked:
                    self._remove_file(parked)
                self._spilled += 1
                self._settle(parked)

    def _read(self, parked: Parked, lost: str) -> None:
        if lost:
            self.drop(parked, lost)
        with self._lock:
            parked.readers -= 1
            self._settle(parked)
