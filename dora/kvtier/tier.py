"""A worker's part of the shared tier: one thread that fetches and stores chunks, beside the engine's steps.

Every wait for the tier has a timeout. When the server does not answer, the tier is *down*: searches find nothing,
chunks to be stored are dropped, and the thread tries to reach the server every second.
"""

import contextlib
import logging
import mmap
import os
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from dora.data.types import TierLoad
from dora.errors import TransferFailed
from dora.kvtier.chunks import ChunkShape, is_sealed, salt_of, seal
from dora.kvtier.wire import TierConnection, key_of, registration
from dora.kvtransfer.memory import BufferPool

log = logging.getLogger("dora.worker")

TIMEOUT_S: Final = 1.0  # per request
RETRY_S: Final = 1.0
ENDED_MAX: Final = 4096  # earlier ones are not reported: LMCache forgets them by itself
PING_S: Final = 10.0  # the server forgets a worker after six times as long
SEGMENT: Final = re.compile(r"[\w.-]{1,200}")


@dataclass(frozen=True, slots=True)
class Passage:
    """The prefix of a request, in whole chunks."""

    session: str  # the request on this worker; LMCache stores its prefix state under this name
    version: int
    token_ids: Sequence[int]
    digests: Sequence[bytes]  # of each chunk


@dataclass(slots=True)
class Search:
    """A search for chunks. Once ``done``, it has the chunks found: consecutive, from ``first`` on."""

    passage: Passage
    first: int
    done: threading.Event = field(default_factory=threading.Event)
    cancelled: bool = False
    held: int | None = None  # chunks of the passage that the server has; None: it could not be asked
    chunks: np.ndarray | None = None  # uint8 (chunks, sealed bytes); None: none

    @property
    def end(self) -> int:
        """The end of the chunks found: one after the last."""
        return self.first + (0 if self.chunks is None else len(self.chunks))


@dataclass(frozen=True, slots=True)
class _Keeping:
    passage: Passage
    first: int
    chunks: np.ndarray


class Tier:
    """A worker's tier. ``memory_bytes`` limits chunks in transit to it, and separately found chunks not used yet."""

    def __init__(self, endpoint: str, shape: ChunkShape, memory_bytes: int, timeout_s: float = TIMEOUT_S) -> None:
        self._shape = shape
        self._timeout_s = timeout_s
        self._connection = TierConnection(endpoint, timeout_s)
        self.instance = secrets.randbits(53)
        self._outgoing, self._incoming = BufferPool(memory_bytes), BufferPool(memory_bytes)
        self._segment: np.ndarray | None = None
        self._segment_id = 0
        self._searches: deque[Search] = deque()
        self._keepings: deque[_Keeping] = deque()
        self._ended: deque[str] = deque(maxlen=ENDED_MAX)
        self._wake = threading.Condition()
        self._closing = False
        self._load = TierLoad()
        self._why_down = ""
        self.up = threading.Event()
        self.opened = 0  # times that a server was found, each of which may be empty
        self._thread = threading.Thread(target=self._run, name="kv-tier", daemon=True)
        self._thread.start()

    @property
    def load(self) -> TierLoad:
        return self._load

    def search(self, passage: Passage, first: int) -> Search:
        """Searches for the chunks of a passage, from ``first`` on. A tier that is down has none."""
        search = Search(passage, first)
        with self._wake:
            if self.up.is_set():
                self._searches.append(search)
                self._wake.notify()
            else:
                search.done.set()
        return search

    def room(self, chunks: int) -> np.ndarray | None:
        """Returns memory for chunks to be stored, or None while the tier is down or too many are in transit."""
        if not self.up.is_set():
            return None
        array = self._outgoing.array(chunks * self._shape.sealed_bytes)
        return None if array is None else array.reshape(chunks, self._shape.sealed_bytes)

    def keep(self, passage: Passage, first: int, chunks: np.ndarray) -> None:
        """Seals and stores chunks of a passage, from ``first`` on, that were written into ``room``."""
        with self._wake:
            if self.up.is_set():
                self._keepings.append(_Keeping(passage, first, chunks))
                self._wake.notify()

    def end(self, session: str) -> None:
        """Ends the request on this worker, and with it the use of its chunks."""
        with self._wake:
            if self.up.is_set():
                self._ended.append(session)
                self._wake.notify()

    def drain(self, timeout_s: float) -> bool:
        """Waits until nothing is in transit to the tier. Returns False after the timeout."""
        with self._wake:
            return self._wake.wait_for(lambda: not (self._keepings or self._ended or self._searches), timeout_s)

    def close(self) -> None:
        """Ends the thread, within one timeout; chunks to be stored may be dropped."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    # Run by the thread.

    def _run(self) -> None:
        try:
            while not self._closing:
                try:
                    self._open()
                    self._work()
                except TransferFailed as error:
                    self._lost(str(error))
            with contextlib.suppress(TransferFailed):
                if self.up.is_set():
                    self._connection.call("unregister_kv_cache_engine_driven_context", self.instance)
        finally:
            self._closing = True
            self._lost("its thread has ended")
            self._connection.close()

    def _open(self) -> None:
        chunk_tokens = self._connection.call("get_chunk_size")
        if chunk_tokens != self._shape.chunk_tokens:
            raise TransferFailed(f"its chunks have {chunk_tokens} tokens, this engine's {self._shape.chunk_tokens}")
        self._segment_id, self._segment = _mapped(self._greet())
        self.opened += 1
        self._why_down = ""
        self._tell(up=True)
        self.up.set()
        log.info("the KV tier is up: %d MiB", len(self._segment) >> 20)

    def _greet(self) -> Path:
        """Registers this worker and pings the server. Returns the path of the server's memory.

        Both are needed: a registration alone expires late, and pings of unknown workers are answered too.
        """
        shape = self._shape
        own = registration(self.instance, shape.name, shape.block_tokens, shape.sealed_bytes)
        answer = self._connection.call("register_kv_cache_engine_driven_context", own)
        self._connection.call("ping", self.instance)
        name = _field(answer, "shm_name", str)
        if not SEGMENT.fullmatch(name):
            raise TransferFailed("LMCache's server has no shared memory")
        return Path("/dev/shm", name)

    def _work(self) -> None:
        """Serves searches first, as requests wait for them. Returns only when the worker ends."""
        pinged_s = time.monotonic()
        while True:
            with self._wake:
                self._wake.notify_all()
                wait_s = pinged_s + PING_S - time.monotonic()
                self._wake.wait_for(self._has_job, max(0.0, wait_s))
                if self._closing:
                    return
                search = self._searches[0] if self._searches else None
                keeping = self._keepings[0] if self._keepings and search is None else None
                session = self._ended[0] if self._ended and search is None and keeping is None else None
            if search is not None:
                self._search(search)
                self._searches.popleft()
                search.done.set()
            elif keeping is not None:
                self._keep(keeping)
                self._keepings.popleft()
            elif session is not None:
                self._connection.call("end_session", self._session(session))
                self._ended.popleft()
            if time.monotonic() > pinged_s + PING_S:
                if _id_of(self._greet()) != self._segment_id:
                    raise TransferFailed("its server was replaced")
                pinged_s = time.monotonic()

    def _has_job(self) -> bool:
        return bool(self._closing or self._searches or self._keepings or self._ended)

    def _lost(self, reason: str) -> None:
        with self._wake:
            if self.up.is_set() and not self._closing:
                self._tell(up=False, losses=self._load.losses + 1)
            if reason != self._why_down and not self._closing:
                log.warning("the KV tier is down: %s", reason)
            self._why_down = reason
            self.up.clear()
            for search in self._searches:
                search.done.set()
            self._searches.clear()
            self._keepings.clear()
            self._ended.clear()
            self._segment = None
            self._wake.notify_all()
            self._wake.wait_for(lambda: self._closing, RETRY_S)

    def _search(self, search: Search) -> None:
        if search.cancelled:
            return
        passage, chunk_tokens = search.passage, self._shape.chunk_tokens
        whole = self._key(passage, 0, len(passage.digests), is_lookup=True)
        self._connection.call("lookup", whole, 1)
        found = self._connection.call("wait_prefetch_status", self._session(passage.session), self._timeout_s / 2)
        if not isinstance(found, int) or found < 0:
            return
        held = min(found, len(passage.digests))
        search.held = held
        room = None
        if held > search.first:
            room = self._incoming.array((held - search.first) * self._shape.sealed_bytes)
        unread = min(search.first, held) if room is not None else held
        if unread:
            self._connection.call("free_lookup_locks", {**whole, "end": unread * chunk_tokens}, 1)
        if room is not None:
            self._fetch(search, held, room.reshape(held - search.first, self._shape.sealed_bytes))

    def _fetch(self, search: Search, held: int, chunks: np.ndarray) -> None:
        passage = search.passage
        key = self._key(passage, search.first, held)
        answer = self._connection.call("prepare_retrieve", key, self.instance)
        slots = _field(answer, "context", dict).get("slots", ())
        if len(slots) != len(chunks):
            return
        for chunk, slot in zip(chunks, slots, strict=True):
            chunk[:] = self._slot(slot)
        self._connection.call("commit_retrieve", key, self.instance)
        whole = 0
        while whole < len(chunks) and is_sealed(chunks[whole], passage.digests[search.first + whole]):
            whole += 1
        if whole < len(chunks):
            self._tell(damaged_chunks=self._load.damaged_chunks + 1)
            log.warning("the KV tier has an incomplete chunk: that chunk and those after it are computed again")
        search.chunks = chunks[:whole] if whole else None

    def _keep(self, keeping: _Keeping) -> None:
        passage, first = keeping.passage, keeping.first
        for chunk, digest in zip(keeping.chunks, passage.digests[first:], strict=True):
            seal(chunk, digest)
        key = self._key(passage, first, first + len(keeping.chunks))
        context = _field(self._connection.call("prepare_store", key, self.instance), "context", dict)
        slots, indices = context.get("slots", []), context.get("chunk_indices", [])
        if len(slots) != len(indices) or not set(indices) <= set(range(len(keeping.chunks))):
            raise TransferFailed("LMCache's server requested chunks that it was not offered")
        for slot, index in zip(slots, indices, strict=True):
            self._slot(slot)[:] = keeping.chunks[index]
        if slots:  # empty: it has them all, or no room
            self._connection.call("commit_store", key, self.instance, b"")
            self._tell(kept_tokens=self._load.kept_tokens + len(slots) * self._shape.chunk_tokens)

    def _key(self, passage: Passage, first: int, end: int, *, is_lookup: bool = False) -> dict[str, Any]:
        chunk_tokens = self._shape.chunk_tokens
        return dict(
            key_of(
                self._shape.name,
                salt_of(passage.version),
                passage.token_ids[: len(passage.digests) * chunk_tokens],
                first * chunk_tokens,
                end * chunk_tokens,
                self._session(passage.session),
                is_lookup=is_lookup,
            )
        )

    def _session(self, name: str) -> str:
        """Makes session names unique, as workers share a server."""
        return f"{self.instance:x}-{name}"

    def _slot(self, slot: Any) -> np.ndarray:
        offset, length = _field(slot, "offset", int), _field(slot, "length", int)
        assert self._segment is not None
        if length != self._shape.sealed_bytes or not 0 <= offset <= len(self._segment) - length:
            raise TransferFailed(f"LMCache's server named {length} bytes at {offset}, which cannot hold a chunk")
        return self._segment[offset : offset + length]

    def _tell(self, **changes: Any) -> None:
        self._load = replace(self._load, **changes)


def _field(answer: Any, name: str, kind: type) -> Any:
    value = answer.get(name) if isinstance(answer, dict) else None
    if not isinstance(value, kind):
        raise TransferFailed(f"LMCache's server answered without {name}")
    return value


def _mapped(segment: Path) -> tuple[int, np.ndarray]:
    """Maps the server's shared memory. Returns it with an id that distinguishes it from another of the same name."""
    try:
        descriptor = os.open(segment, os.O_RDWR | os.O_NOFOLLOW)
        try:
            return os.fstat(descriptor).st_ino, np.frombuffer(mmap.mmap(descriptor, 0), np.uint8)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise TransferFailed(f"the shared memory of LMCache's server: {error}") from error


def _id_of(segment: Path) -> int:
    try:
        return segment.stat().st_ino
    except OSError as error:
        raise TransferFailed(f"the shared memory of LMCache's server: {error}") from error
