"""A digest of what environments have given to a session, which tells histories apart."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

DIGEST_BYTES: Final = 16


def given_digest(token_ids: Sequence[int] | np.ndarray, runs: Iterable[tuple[int, int]]) -> bytes:
    """Returns a digest of the given runs of a response; empty without any. ``runs``: (first, one after the last).

    Two histories of one session whose digests are equal have the same tokens as far as both go: sampled tokens follow
    from those before.
    """
    digest, any_run = hashlib.blake2b(digest_size=DIGEST_BYTES), False
    for first, end in runs:
        any_run = True
        digest.update(np.asarray((first, end), "<i8").tobytes())
        digest.update(np.asarray(token_ids[first:end], "<i4").tobytes())
    return digest.digest() if any_run else b""
