"""The KV snapshot: one live request, frozen, as data. Uses numpy, not torch.

``codec`` converts a snapshot to a head and a body of bytes, ``layout`` checks whether one fits an engine, and ``plane``
moves it between workers.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final, NamedTuple

import numpy as np
from blake3 import blake3

from dora.data.types import RequestSpec
from dora.kvtransfer.device import OnDevice

SCHEMA = 8

STATE: Final = -1  # as the window of a layer: it keeps one state instead of KV of its tokens

# Each uint8 of shape (blocks, bytes per block), in the order of the blocks; contiguous, unless cut by ``reslice``.
Pieces = Sequence[np.ndarray] | Sequence[np.ndarray | OnDevice]
# One segment of a request, its time in a slot: a number for each arrival here, and its preemptions since.
SegmentId = tuple[int, int]
# The interior of one layer's block: the number of rows (usually one per KV head), and the strips of each row. A strip
# of (outer, inner) is an array of shape (outer, tokens of the block, inner bytes). Without strips the contents of a row
# are unknown; with 0 rows their number is unknown too. Of a state (``STATE``): the number of heads, and strips of which
# each is an array of shape (outer, heads, inner bytes).
Interior = tuple[int, tuple[tuple[int, int], ...]]
UNKNOWN: Final[Interior] = (0, ())


class Prefix(NamedTuple):
    """The first blocks of a snapshot, which its target has from the first round of another one."""

    key: str  # key of that round
    blocks: int


NO_PREFIX: Final = Prefix("", 0)


@dataclass(frozen=True, slots=True)
class KvLayout:
    """All properties in which two engines must agree to exchange KV bytes."""

    fingerprint: str  # EngineCapability.fingerprint
    # e.g. "cpu/amx" or "cuda/flash": attention backend and instruction set, which shape the block interior
    backend: str
    dtype: str
    block_tokens: int
    layers: tuple[tuple[str, int], ...]  # (layer name, bytes per block)
    shards: int = 1  # per layer, named by ``reslice``: tensor parallelism splits its KV heads into these
    # per layer: how many last tokens it reads, 0 for all, STATE: none, but the state that it made of them, below that:
    # those of a chunk of so many; empty: all layers read all
    windows: tuple[int, ...] = ()
    interiors: tuple[Interior, ...] = ()  # per layer; empty: all are UNKNOWN, and move whole or not at all

    @property
    def digest(self) -> str:
        """Is equal for layouts whose blocks may be copied unconverted, and names chunks of the KV tier."""
        return blake3(json.dumps(asdict(self)).encode()).hexdigest(16)

    @property
    def windowed(self) -> dict[str, int]:
        """The layers that read only the last tokens, and how many, or a state (``STATE``)."""
        named = zip(self.layers, self.windows, strict=bool(self.windows))
        return {name: window for (name, _), window in named if window}

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of all layers, without those that keep a state."""
        return sum(size for _, size in self.layers) - self.state_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of a request's state in all layers that keep one."""
        windowed = self.windowed
        return sum(size for name, size in self.layers if windowed.get(name) == STATE)


@dataclass(frozen=True, slots=True)
class KvSnapshot:
    """A request's delivered tokens and logprobs, which are authoritative, and its KV, which is a cache of them.

    ``request`` has prompt, outputs, logprobs, sampling and version; the random stream is rebuilt from the seed and the
    number of draws. ``kv_tokens`` is ``len(prompt) + len(outputs) - 1``: the last sampled token has no KV yet. If the
    request was extended and has not sampled since, its last environment tokens have none either. ``blocks[layer]`` are
    the layer's blocks in one or more pieces, so that neither end has to join them: from the first one that the layer
    still reads (``layout.first_block``) to the last, which may be partly filled; a state is a block. An engine's own
    snapshot shows its KV cache while the request is frozen. ``ahead`` earlier blocks are not included: the target has
    them already. ``state_tokens`` counts the tokens of the states as their engine does, 0 for a model without.
    """

    layout: KvLayout
    request: RequestSpec
    kv_tokens: int
    rng_draws: int
    blocks: Mapping[str, Pieces]
    ahead: int = 0
    state_tokens: int = 0


@dataclass(frozen=True, slots=True)
class FullBlocks:
    """Full blocks of a decoding request that are followed by a later block, and so do not change.

    They are valid for one *segment* of the request, its time in a slot: after a preemption it has other blocks. Layers
    with a window have none, as the engine reclaims their blocks while the request decodes, nor have those with a state,
    which every step changes.
    """

    segment: SegmentId
    end: int  # one after the last block, counted from the request's first block
    blocks: Mapping[str, Pieces]  # from the requested block on, as many as were asked for; views, not copies
