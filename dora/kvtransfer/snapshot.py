"""The KV snapshot: one live request, frozen, as data. Numpy only, no torch.

``codec`` turns a snapshot into a head and a body of bytes, ``layout`` says whether one fits an engine, ``plane`` moves
it from worker to worker.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from blake3 import blake3

from dora.types import RequestSpec

SCHEMA = 3

Pieces = Sequence[np.ndarray]  # each uint8 of shape (blocks, bytes per block), contiguous; in the order of the blocks


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Everything that must agree for KV bytes of one engine to mean the same in another."""

    fingerprint: str  # EngineCapability.fingerprint
    backend: str  # e.g. "cpu/amx" or "cuda/flash": attention backend and instruction set that shape the block interior
    dtype: str
    block_tokens: int
    layers: tuple[tuple[str, int], ...]  # (layer name, bytes per block)
    shards: int = 1  # of each layer, as ``reslice`` names them: parts that tensor parallelism splits its KV heads into
    heads: tuple[int, ...] = ()  # of each layer: KV heads that lie one after the other in a block; 0, or empty: none do

    @property
    def digest(self) -> str:
        """The same text for layouts whose blocks may be copied as they are."""
        return blake3(json.dumps(asdict(self)).encode()).hexdigest(16)

    @property
    def block_bytes(self) -> int:
        """Of one block in all layers."""
        return sum(size for _, size in self.layers)


@dataclass(frozen=True, slots=True)
class KvSnapshot:
    """A request's delivered tokens and logprobs (the truth) and its KV (a cache of them).

    ``request`` carries prompt, outputs, logprobs, sampling and version; the random stream is re-made from the seed and
    the number of draws. ``kv_tokens`` is ``len(prompt) + len(outputs) - 1``: the last sampled token has no KV yet.
    ``blocks[layer]`` are the layer's blocks in one or more pieces, so that neither end has to copy them together; the
    last block may be partly filled. An engine's own snapshot shows its KV-cache, as long as the request is frozen.
    ``ahead`` blocks before them are not among them: they were written where the request is to be taken in.
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
    """

    stay: int
    end: int  # one after the last of them, counted from the request's first block
    blocks: Mapping[str, Pieces]  # from the block that was asked for on; shown, not copied
