"""The KV snapshot: one live request, frozen, as data; and the seam over which snapshots travel.

Pure data: numpy only, no torch. ``codec`` turns a snapshot into bytes, ``layout`` says whether one fits an engine,
``shm`` moves it between processes of one host.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dora.types import RequestSpec

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Everything that must agree for KV bytes of one engine to mean the same in another."""

    fingerprint: str  # EngineCapability.fingerprint
    backend: str  # e.g. "cpu/amx" or "cuda/flash": attention backend and instruction set that shape the block interior
    dtype: str
    block_tokens: int
    layers: tuple[tuple[str, int], ...]  # (layer name, bytes per block)
    tp_rank: int = 0
    tp_size: int = 1


@dataclass(frozen=True, slots=True)
class KvSnapshot:
    """A request's delivered tokens and logprobs (the truth) and its KV (a cache of them).

    ``request`` carries prompt, outputs, logprobs, sampling and version; the random stream is re-made from the seed and
    the number of draws. ``kv_tokens`` is ``len(prompt) + len(outputs) - 1``: the last sampled token has no KV yet.
    ``blocks[layer]`` has shape (blocks, bytes per block), uint8; the last block may be partly filled.
    """

    layout: KvLayout
    request: RequestSpec
    kv_tokens: int
    rng_draws: int
    blocks: Mapping[str, np.ndarray]


class KvTransport(Protocol):
    """Moves snapshots from one worker to another. A locator names one snapshot; it is short and travels as text.

    This is the seam for other data planes: a TCP or RDMA transport hands out ``host:port/key`` locators and streams on
    ``get``, a host-memory tier keeps what was ``put`` until it is released. The contract is the same for all: a
    snapshot is immutable once put, may be got any number of times by any process that knows the locator, and lives
    until it is released.
    """

    def put(self, snapshot: KvSnapshot) -> str:
        """Publishes a snapshot; its locator. Raises SnapshotRefused where there is no room for it."""

    def get(self, locator: str) -> KvSnapshot:
        """The snapshot, checked. Raises NotFound for an unknown locator, SnapshotRefused for a damaged snapshot.

        Its arrays are read-only and may share the transport's memory, which lives as long as they do.
        """

    def check(self, locator: str, owner: str) -> None:
        """Raises InvalidValue for a locator that ``put`` of this writer cannot have handed out."""

    def release(self, locator: str) -> None:
        """Frees a snapshot. Unknown locators are ignored, so that a release may be repeated."""

    def sweep(self, owners: Collection[str], kept: Collection[str]) -> None:
        """Frees what any other writer has put, or began to put, but for the locators that are ``kept``.

        A writer that dies in the act leaves a snapshot that nobody knows: its locator would have come with its word.
        """
