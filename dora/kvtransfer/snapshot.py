"""The KV snapshot: one live request, frozen, as data. Numpy only, no torch.

``codec`` turns a snapshot into a head and a body of bytes, ``layout`` says whether one fits an engine, ``plane`` moves
it from worker to worker.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final, NamedTuple

import numpy as np
from blake3 import blake3

from dora.data.types import RequestSpec

SCHEMA = 5

# Each uint8 of shape (blocks, bytes per block), in the order of the blocks; contiguous, unless ``reslice`` cut them.
Pieces = Sequence[np.ndarray]
# One stay of a request in a slot: a number of its own for each time that it came here, and its preemptions since.
Stay = tuple[int, int]
# What one layer's block is made of: strips in a row, the whole row so many times (once a KV head, as a rule). A strip
# of (outer, inner) is an array of shape (outer, tokens of the block, inner bytes). Without strips nobody knows what is
# in a row, and with 0 rows not even how many there are.
Interior = tuple[int, tuple[tuple[int, int], ...]]
UNKNOWN: Final[Interior] = (0, ())


class Prefix(NamedTuple):
    """The first blocks of a snapshot, which its target has: they came with the first round of another one."""

    key: str  # of that round
    blocks: int


NO_PREFIX: Final = Prefix("", 0)


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Everything that must agree for KV bytes of one engine to mean the same in another."""

    fingerprint: str  # EngineCapability.fingerprint
    backend: str  # e.g. "cpu/amx" or "cuda/flash": attention backend and instruction set that shape the block interior
    dtype: str
    block_tokens: int
    layers: tuple[tuple[str, int], ...]  # (layer name, bytes per block)
    shards: int = 1  # of each layer, as ``reslice`` names them: parts that tensor parallelism splits its KV heads into
    windows: tuple[int, ...] = ()  # of each layer: how many last tokens it reads, 0 for all; empty: all layers read all
    interiors: tuple[Interior, ...] = ()  # of each layer; empty: all are UNKNOWN, and move whole or not at all

    @property
    def digest(self) -> str:
        """The same text for layouts whose blocks may be copied as they are: chunks of the KV tier are named by it."""
        return blake3(json.dumps(asdict(self)).encode()).hexdigest(16)

    @property
    def windowed(self) -> dict[str, int]:
        """The layers that read the last tokens alone, and how many."""
        named = zip(self.layers, self.windows, strict=bool(self.windows))
        return {name: window for (name, _), window in named if window}

    @property
    def block_bytes(self) -> int:
        """Of one block in all layers."""
        return sum(size for _, size in self.layers)


@dataclass(frozen=True, slots=True)
class KvSnapshot:
    """A request's delivered tokens and logprobs (the truth) and its KV (a cache of them).

    ``request`` carries prompt, outputs, logprobs, sampling and version; the random stream is re-made from the seed and
    the number of draws. ``kv_tokens`` is ``len(prompt) + len(outputs) - 1``: the last sampled token has no KV yet.
    ``blocks[layer]`` are the layer's blocks in one or more pieces, so that neither end has to copy them together: from
    the first one that the layer still reads (``layout.first_block``) to the last, which may be partly filled. An
    engine's own snapshot shows its KV-cache, as long as the request is frozen. ``ahead`` blocks before them are not
    among them: they are where the request is to be taken in.
    """

    layout: KvLayout
    request: RequestSpec
    kv_tokens: int
    rng_draws: int
    blocks: Mapping[str, Pieces]
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class FullBlocks:
    """Blocks of a request that decodes which are full, and have a later block after them: they do not change any more.

    That holds for one *stay* of the request in its slot: a request that is preempted comes back with other blocks.
    Layers with a window have none: the engine takes their blocks back while the request decodes.
    """

    stay: Stay
    end: int  # one after the last of them, counted from the request's first block
    blocks: Mapping[str, Pieces]  # from the block that was asked for on; shown, not copied
