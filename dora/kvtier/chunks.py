"""A chunk: consecutive blocks of one prefix, as bytes, with a seal that identifies them.

LMCache names a chunk by its tokens, the tokens before it, the model and a salt. Readers see a chunk even if its writer
died before it was written. Each chunk therefore ends with a seal: the digest of its identity and the digest of its
bytes. Both guard against damage and mistakes, not against attacks: anybody who can write this user's shared memory can
do more than that.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from xxhash import xxh3_128_digest

from dora.kvtransfer.snapshot import KvLayout, Pieces

DIGEST_BYTES: Final = 16
SEAL_BYTES: Final = 2 * DIGEST_BYTES
CHUNK_TOKENS_MIN: Final = 32
SCHEMA: Final = "dora-1"


def salt_of(version: int) -> str:
    """Returns the salt of every chunk's name, so that requests of another version never find its KV."""
    return f"pv{version}"


def chunk_tokens_of(block_tokens: int) -> int:
    """Returns the tokens of whole blocks, at least 32 in total: each chunk takes milliseconds to find and to store."""
    return -(-CHUNK_TOKENS_MIN // block_tokens) * block_tokens


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """The shape of an engine's chunks: the blocks of a layer are consecutive, the layers in the layout's order."""

    fingerprint: str  # of everything in which engines must agree to exchange blocks
    block_tokens: int
    chunk_tokens: int
    layers: tuple[tuple[str, int], ...]  # (layer name, bytes per block)

    @classmethod
    def of(cls, layout: KvLayout) -> "ChunkShape":
        whole = layout.digest  # the layout's own fingerprint ignores differences that can be converted
        return cls(whole, layout.block_tokens, chunk_tokens_of(layout.block_tokens), layout.layers)

    @property
    def name(self) -> str:
        """The model in LMCache's names; engines with different names find none of each other's chunks."""
        return f"{SCHEMA}-{self.fingerprint}"

    @property
    def blocks(self) -> int:
        return self.chunk_tokens // self.block_tokens

    @property
    def body_bytes(self) -> int:
        return self.blocks * sum(size for _, size in self.layers)

    @property
    def sealed_bytes(self) -> int:
        return self.body_bytes + SEAL_BYTES

    def write(self, blocks: Mapping[str, Pieces], chunks: np.ndarray) -> None:
        """Copies the blocks of whole chunks into ``chunks``: uint8 of shape (chunks, sealed bytes)."""
        first = 0
        for name, size in self.layers:
            end = first + self.blocks * size
            places = chunks[:, first:end].reshape(len(chunks), self.blocks, size)
            at = 0
            for piece in blocks[name]:
                places[np.divmod(np.arange(at, at + len(piece)), self.blocks)] = piece
                at += len(piece)
            first = end

    def show(self, chunks: np.ndarray, first_block: int, end_block: int) -> dict[str, Pieces]:
        """Returns views of some blocks of ``chunks``, counted from its first."""
        shown: dict[str, Pieces] = {}
        first = 0
        for name, size in self.layers:
            end = first + self.blocks * size
            pieces = [row[first:end].reshape(self.blocks, size) for row in chunks]
            shown[name] = list(_within(pieces, first_block, end_block))
            first = end
        return shown


def _within(pieces: Sequence[np.ndarray], first: int, end: int) -> Iterator[np.ndarray]:
    at = 0
    for piece in pieces:
        part = piece[max(0, first - at) : max(0, end - at)]
        if len(part):
            yield part
        at += len(piece)


class ChunkChain:
    """The digests of a prefix's chunks: each covers its tokens, all before it, the engine's KV and the version."""

    def __init__(self, shape: ChunkShape, version: int) -> None:
        self._chunk_tokens = shape.chunk_tokens
        self._last = xxh3_128_digest(f"{shape.name} {shape.chunk_tokens} {salt_of(version)}".encode())
        self._digests: list[bytes] = []

    def digests(self, token_ids: Sequence[int], end: int) -> list[bytes]:
        """Returns digests of the first ``end`` chunks of ``token_ids``, which must extend those of earlier calls."""
        for index in range(len(self._digests), end):
            tokens = token_ids[index * self._chunk_tokens : (index + 1) * self._chunk_tokens]
            self._last = xxh3_128_digest(self._last + np.asarray(tokens, "<i8").tobytes())
            self._digests.append(self._last)
        return self._digests[:end]


def seal(chunk: np.ndarray, digest: bytes) -> None:
    """Writes the seal of a chunk (uint8 of ``sealed_bytes``): its identity and the digest of its bytes."""
    written = digest + xxh3_128_digest(chunk[:-SEAL_BYTES].data)
    chunk[-SEAL_BYTES:] = np.frombuffer(written, np.uint8)


def is_sealed(chunk: np.ndarray, digest: bytes) -> bool:
    return bytes(chunk[-SEAL_BYTES:]) == digest + xxh3_128_digest(chunk[:-SEAL_BYTES].data)
