"""A tier for tests: LMCache's own server in a process of its own, and what workers put there."""

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dora.kvtier import server
from dora.kvtier.chunks import SEAL_BYTES, ChunkChain, ChunkShape
from dora.kvtier.tier import Passage, Search, Tier

WAIT_S = 60.0
SHAPE = ChunkShape("fingerprint", 32, 32, (("layer.0", 3000), ("layer.1", 1000)))


def lmcache_missing() -> str:
    """Returns the reason for which this machine has no tier; empty: it has one."""
    try:
        found = importlib.metadata.version("lmcache")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    return "" if found == server.VERSION else f"needs lmcache {server.VERSION} (found: {found})"


needs_lmcache = pytest.mark.skipif(bool(lmcache_missing()), reason=lmcache_missing())


class TierProcess:
    """The server of one run folder. It may be killed and started again."""

    def __init__(self, folder: Path, size_mb: int = 64, chunk_tokens: int = 32) -> None:
        self.folder = folder
        self._arguments = [str(folder), str(size_mb), str(chunk_tokens)]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"ipc://{server.socket_of(self.folder)}"

    def start(self) -> None:
        """Returns once it serves."""
        argv = [sys.executable, "-P", server.__file__, *self._arguments]
        with (self.folder / "kv-tier.log").open("ab") as log:
            self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log)
        assert "size_bytes" in self.told(), (self.folder / "kv-tier.log").read_text()

    def told(self) -> dict[str, int]:
        """The next thing that it says."""
        assert self.process is not None and self.process.stdout is not None
        line = self.process.stdout.readline()
        return dict(json.loads(line)) if line else {}

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """It stands still in this block. Some of its threads run on after the signal was sent, and may answer."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Ends it as a crash would."""
        assert self.process is not None and self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.process = None

    def stop(self) -> int:
        """Ends it as a service does. Returns its exit code."""
        assert self.process is not None and self.process.stdout is not None
        self.process.terminate()
        code = self.process.wait(WAIT_S)
        self.process.stdout.close()
        self.process = None
        return code


@contextmanager
def serving(folder: Path, **options: int) -> Iterator[TierProcess]:
    """A server, until the end of the block."""
    process = TierProcess(folder, **options)
    process.start()
    try:
        yield process
    finally:
        if process.process is not None:
            process.kill()
        server.remove_left(folder)


@contextmanager
def opened(endpoint: str, shape: ChunkShape = SHAPE, **options: Any) -> Iterator[Tier]:
    """A worker's part of the tier, up."""
    tier = Tier(endpoint, shape, 8 << 20, **options)
    try:
        assert tier.up.wait(WAIT_S)
        yield tier
    finally:
        tier.close()


def passage(name: str, token_ids: list[int], version: int = 1, shape: ChunkShape = SHAPE) -> Passage:
    """All whole chunks of these tokens."""
    count = len(token_ids) // shape.chunk_tokens
    return Passage(name, version, token_ids, ChunkChain(shape, version).digests(token_ids, count))


def bodies(seed: int, count: int, shape: ChunkShape = SHAPE) -> np.ndarray:
    """Returns a possible KV of so many chunks."""
    return np.random.default_rng(seed).integers(0, 256, (count, shape.body_bytes), np.uint8)


def keep(tier: Tier, wanted: Passage, chunks: np.ndarray) -> None:
    """Puts all chunks of a passage into the tier."""
    room = tier.room(len(chunks))
    assert room is not None
    room[:, :-SEAL_BYTES] = chunks
    tier.keep(wanted, 0, room)
    assert tier.drain(WAIT_S)


def find(tier: Tier, wanted: Passage, first: int = 0) -> Search:
    """Returns the tier's entries for a passage."""
    search = tier.search(wanted, first)
    assert search.done.wait(WAIT_S)
    return search


def found_bodies(search: Search) -> np.ndarray:
    """The KV of the chunks that were found."""
    assert search.chunks is not None
    return search.chunks[:, :-SEAL_BYTES]
