"""Predicts the time of a pipelined chain and chooses the size of its pieces.

Source: Laminar, appendix C. A body of M bytes passes p hosts, its holder included, in k pieces of M/k bytes. A piece
takes ``start_s + M/k / bytes_per_s`` on each of the p - 1 links, and pieces follow one another. The last host has the
body after

    T(p, k) = (p + k - 2) (M / (k bytes_per_s) + start_s)

which is least at k* = sqrt((p - 2) M / (bytes_per_s start_s)). Checksums cover chunks of the manifest, so a piece
consists of whole chunks, and the best such number is chosen.
"""

import math
from dataclasses import dataclass
from typing import Final

from dora.errors import InvalidValue

PIECE_BYTES_MAX: Final = 32 << 20  # a piece is in flight, or being checked, four times at a host
SMOOTHING: Final = 0.3  # weight of a new measurement


@dataclass(frozen=True, slots=True)
class Link:
    """A link between two hosts. Raises InvalidValue unless both numbers are finite and positive."""

    bytes_per_s: float
    start_s: float  # cost of a piece whatever its size: frames, threads, latency of the first byte

    def __post_init__(self) -> None:
        for field, value in (("bytes_per_s", self.bytes_per_s), ("start_s", self.start_s)):
            if not (math.isfinite(value) and value > 0):
                raise InvalidValue(f"link: {field}", value, "finite and above 0")

    def after(self, measured: "Link") -> "Link":
        """Returns the smoothed estimate after one more measurement."""
        return Link(
            self.bytes_per_s + SMOOTHING * (measured.bytes_per_s - self.bytes_per_s),
            self.start_s + SMOOTHING * (measured.start_s - self.start_s),
        )


ASSUMED: Final = Link(1e9, 5e-4)  # until one was measured


def broadcast_s(link: Link, hosts: int, body_bytes: int, pieces: int) -> float:
    """Returns T(p, k): when the last of ``hosts`` (at least 2, the holder included) has the whole body."""
    return (hosts + pieces - 2) * (body_bytes / pieces / link.bytes_per_s + link.start_s)


def chain_s(link: Link, hosts: int, body_bytes: int, piece_bytes: int) -> float:
    """Returns when the last of ``hosts`` has a body in pieces of ``piece_bytes``; the last piece may be shorter."""
    pieces = max(1, -(-body_bytes // piece_bytes))
    last_s = (body_bytes - (pieces - 1) * piece_bytes) / link.bytes_per_s + link.start_s
    if pieces == 1:
        return (hosts - 1) * last_s
    return (hosts + pieces - 3) * (piece_bytes / link.bytes_per_s + link.start_s) + last_s


def piece_chunks(link: Link, hosts: int, body_bytes: int, chunk_bytes: int) -> int:
    """Returns the number of chunks in a piece for which the last of ``hosts`` has the body soonest; at least one.

    Two hosts have nothing to pipeline, so their piece is the largest, up to PIECE_BYTES_MAX.
    """
    chunks = max(1, -(-body_bytes // chunk_bytes))
    sizes = range(1, max(1, min(chunks, PIECE_BYTES_MAX // chunk_bytes)) + 1)
    return min(sizes, key=lambda each: chain_s(link, hosts, body_bytes, each * chunk_bytes))
