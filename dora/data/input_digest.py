"""A digest of a session's history without its sampled tokens, which tells histories apart."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from dora.data.sampling import DOMAINS
from dora.data.types import SamplingParams

DIGEST_BYTES: Final = 16

Tokens = Sequence[int] | np.ndarray


def beginning_digest(prompt_token_ids: Tokens) -> bytes:
    """Returns a digest of the context that a branch of a session begins with."""
    return hashlib.blake2b(np.asarray(prompt_token_ids, "<i4").tobytes(), digest_size=DIGEST_BYTES).digest()


def input_digest(
    beginning: bytes, sampling: SamplingParams, token_ids: Tokens, runs: Iterable[tuple[int, int]]
) -> bytes:
    """Returns a digest of a session's present branch: its ``beginning_digest``, the sampling of its present turn, and
    the input runs of its response; empty if ``beginning`` is. ``runs`` are (first, one after the last).

    Two histories of one session whose digests are equal have the same tokens as far as both go: sampled tokens follow
    from those before and the sampling of their turn, and that of earlier turns was in the log before the present one
    was asked.
    """
    if not beginning:
        return b""
    digest = hashlib.blake2b(beginning, digest_size=DIGEST_BYTES)
    numbers = [domain.kind(getattr(sampling, name)) for name, domain in DOMAINS.items()]
    digest.update(repr((numbers, list(sampling.stop), list(sampling.stop_token_ids))).encode())
    for first, end in runs:
        digest.update(np.asarray((first, end), "<i8").tobytes())
        digest.update(np.asarray(token_ids[first:end], "<i4").tobytes())
    return digest.digest()
