"""The fake engine's model: hashes instead of arithmetic.

Each token's KV is a hash of the weights, the token and the KV before it. Each sampled token and logprob is a hash of
the weights, all KV so far, the last token and, unless greedy, the seed.
"""

import math
import struct
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from blake3 import blake3

from dora.data.types import RequestSpec, RoutingShape
from dora.errors import InvalidValue
from dora.kvtransfer.snapshot import STATE, KvLayout, Pieces
from dora.weights.reference import Reference, TensorHeader, check_tensors, read_header, weight_files
from dora.worker.reservation import SLICE_BYTES

STOP_TOKEN_ID: Final = 2  # as in the tiny models
LAYERS: Final = ("fake.0", "fake.1")
KV_BYTES: Final = 8  # of one token in one layer
_FIRST_TOKEN_ID: Final = 3  # padding, begin and end are never sampled as ordinary tokens


class Kv(dict[str, bytearray]):
    """Layer -> KV of all tokens in order. ``read`` has the hash of each layer's first bytes, and their number."""

    def __init__(self, layers: Iterable[str] = ()) -> None:
        super().__init__((name, bytearray()) for name in layers)
        self.read: dict[str, tuple[Any, int]] = {}

    def cut(self, kv_tokens: int) -> None:
        """Drops the KV after the first ``kv_tokens``."""
        self.read.clear()
        for raw in self.values():
            del raw[kv_tokens * KV_BYTES :]


class FakeModel:
    """``mean_tokens`` is the mean length of responses, which is geometric. The second layer reads the last
    ``window_tokens`` tokens, all for 0. For ``STATE`` it keeps the last token's hash, which follows from all before.
    """

    def __init__(self, vocab_size: int, mean_tokens: int, seed: int, window_tokens: int = 0) -> None:
        self._vocab_size = vocab_size
        self._mean_tokens = mean_tokens
        self._seed = seed.to_bytes(8, "little")
        self._begin = b""  # of all that is hashed: the weights and the seed
        self._window_tokens = window_tokens

    def load(self, version: int, folder: Path, reference: Reference | None) -> None:
        """Takes the bytes of ``folder`` as weights. Raises InvalidValue unless they match the reference."""
        digest = blake3(version.to_bytes(8, "little", signed=True))
        found: dict[str, TensorHeader] = {}
        for name in weight_files(folder):
            found.update(read_header(folder / name))
            try:
                digest.update_mmap(folder / name)
            except OSError as error:  # removed meanwhile
                raise InvalidValue("weights file", str(folder / name), f"a readable file ({error})") from error
        if reference is not None:
            check_tensors(found, reference.tensors)
        self._begin = digest.digest() + self._seed

    def length(self, request: RequestSpec) -> int:
        """Returns the length of the response if nothing ends it earlier."""
        drawn = self._hash("length", request.prompt_token_ids, _seed_of(request)) % 2**32
        return 1 + int(-math.log(1 - drawn / 2**32) * self._mean_tokens)

    def append_kv(self, kv: Kv, token_id: int) -> None:
        for name, raw in kv.items():
            own = self._hash(name, bytes(raw[-KV_BYTES:]), [token_id]).to_bytes(KV_BYTES, "little")
            raw[len(raw) if name == LAYERS[0] or self._window_tokens != STATE else 0 :] = own

    def sample(
        self, request: RequestSpec, kv: Kv, last_token_id: int, ends: bool, forbidden: Container[int]
    ) -> tuple[int, float]:
        """Returns the next token, which is the stop token if the response ``ends``, and its logprob."""
        drawn = self._hash("token", self._read(kv), [last_token_id], _seed_of(request))
        if ends:
            return STOP_TOKEN_ID, _logprob(drawn)
        ordinary = drawn % (self._vocab_size - _FIRST_TOKEN_ID)
        while _FIRST_TOKEN_ID + ordinary in forbidden:
            ordinary = (ordinary + 1) % (self._vocab_size - _FIRST_TOKEN_ID)
        return _FIRST_TOKEN_ID + ordinary, _logprob(drawn)

    def routed(self, kv: Kv, positions: Iterable[int], routing: RoutingShape) -> bytes:
        """Returns the expert rows of these tokens, which follow from their KV: the weights and all earlier tokens."""
        ids = []
        for position in positions:
            place = slice(position * KV_BYTES, (position + 1) * KV_BYTES)
            for layer in range(routing.layers):
                drawn = self._hash("routed", kv[LAYERS[0]][place], [layer]) % routing.experts
                ids += [(drawn + rank) % routing.experts for rank in range(routing.top_k)]
        return np.asarray(ids, f"<u{routing.id_bytes}").tobytes()

    def _read(self, kv: Kv) -> bytes:
        """Returns hashes of the KV that the layers read: the last sampled token has none yet."""
        found = b""
        for name, raw in kv.items():
            if self._window_tokens and name == LAYERS[1]:  # each step overwrites a state
                first = 0 if self._window_tokens == STATE else len(raw) // KV_BYTES + 1 - self._window_tokens
                found += blake3(raw[max(0, first) * KV_BYTES :]).digest()
                continue
            digest, known = kv.read.get(name) or (blake3(), 0)
            digest.update(raw[known:])
            kv.read[name] = digest, len(raw)
            found += digest.digest()
        return found

    def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Returns a logprob for each token but the first, given those before it."""
        return tuple(_logprob(self._hash("score", token_ids[:end])) for end in range(2, len(token_ids) + 1))

    def _hash(self, *parts: str | bytes | Sequence[int]) -> int:
        hashed = self._begin
        for part in parts:
            raw = part.encode() if isinstance(part, str) else part
            raw = raw if isinstance(raw, bytes) else struct.pack(f"<{len(raw)}q", *raw)
            hashed += len(raw).to_bytes(8, "little") + raw
        return int.from_bytes(blake3(hashed).digest(8), "little")


class FakeBlocks:
    """Blocks that belong to no request, of one group; their ids count from 0."""

    slice_bytes = SLICE_BYTES

    def __init__(self, layout: KvLayout, count: int) -> None:
        self._layers = {name: np.zeros((count, block_bytes), np.uint8) for name, block_bytes in layout.layers}

    def show(self, block_ids: Sequence[Sequence[int]]) -> dict[str, list[np.ndarray]]:
        return {name: [raw[list(block_ids[0])]] for name, raw in self._layers.items()}

    def write(self, block_ids: Sequence[Sequence[int]], blocks: Mapping[str, Pieces]) -> None:
        for name, raw in self._layers.items():
            raw[list(block_ids[0])] = np.concatenate(blocks[name])


def _seed_of(request: RequestSpec) -> list[int]:
    return [request.sampling.seed] if request.sampling.temperature > 0 else []


def _logprob(drawn: int) -> float:
    """Uniform in (-8, 0], with few enough bits to be exact in float32."""
    return -(drawn >> 40) / 2**21
