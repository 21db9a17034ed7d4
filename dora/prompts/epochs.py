"""The order of an epoch's prompts: as stored, or permuted by seed and epoch.

The permutation is computed for one index at a time, so it needs no memory: a Feistel network over the next power of
four, walked until the result is a row (John Black and Phillip Rogaway, *Ciphers with Arbitrary Finite Domains*,
sections 3 and 4: generalized Feistel, cycle walking). It depends only on BLAKE2b, so the order of a seed is the same on
every machine and in every release.
"""

from hashlib import blake2b
from typing import Final

EPOCHS_MAX: Final = 1 << 20
SUFFIX: Final = "#"  # precedes the epoch in prompt ids of later epochs
_ROUNDS: Final = 8


def permuted(index: int, count: int, seed: int, epoch: int) -> int:
    """Returns the row, below ``count``, at ``index`` of an epoch: a permutation for each seed and epoch."""
    half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
    key = seed.to_bytes(8, "little") + epoch.to_bytes(8, "little")
    while True:  # at most four iterations on average
        index = _feistel(index, half_bits, key)
        if index < count:
            return index


def _feistel(value: int, half_bits: int, key: bytes) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for number in range(_ROUNDS):
        mixed = blake2b(bytes([number]) + right.to_bytes(8, "little"), digest_size=8, key=key).digest()
        left, right = right, left ^ (int.from_bytes(mixed, "little") & mask)
    return left << half_bits | right
