"""A digest of a session's history without its sampled tokens, which tells histories apart."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

DIGEST_BYTES: Final = 16

Tokens = Sequence[int] | np.ndarray


def beginning_digest(prompt_token_ids: Tokens, seed: int | None) -> bytes:
    """Returns a digest of the context that a branch of a session begins with, and of its seed."""
    digest = hashlib.blake2b(f"{seed}".encode(), digest_size=DIGEST_BYTES)
    digest.update(np.asarray(prompt_token_ids, "<i4").tobytes())
    return digest.digest()


def given_digest(beginning: bytes, token_ids: Tokens, runs: Iterable[tuple[int, int]]) -> bytes:
    """Returns a digest of a session's present branch: its ``beginning_digest``, and the given runs of its response;
    empty if ``beginning`` is. ``runs``: (first, one after the last).

    Two histories of one session whose digests are equal have the same tokens as far as both go: sampled tokens follow
    from those before.
    """
    if not beginning:
        return b""
    digest = hashlib.blake2b(beginning, digest_size=DIGEST_BYTES)
    for first, end in runs:
        digest.update(np.asarray((first, end), "<i8").tobytes())
        digest.update(np.asarray(token_ids[first:end], "<i4").tobytes())
    return digest.digest()
