"""A checksum of tensors that host and GPU compute alike.

Over the bytes as 32-bit words w(0), w(1), ... with their signs, the last one filled up with zeros:

    a = sum of w(i)        b = sum of (i + 1) w(i)        both modulo 2^64

It finds changed, missing and exchanged words. It does not resist an attacker: a trainer is trusted with the weights.
"""

from typing import Final

import torch

BLOCK_BYTES: Final = 4 << 20
WORD_BYTES: Final = 4


def checksum(content: torch.Tensor) -> bytes:
    """Returns the checksum of ``content``, (n,) uint8 on any device, as a and b, 8 bytes each."""
    a = torch.zeros((), dtype=torch.int64, device=content.device)
    b = torch.zeros_like(a)
    room = torch.empty(min(BLOCK_BYTES, len(content) + WORD_BYTES), dtype=torch.uint8, device=content.device)
    for begin in range(0, len(content), BLOCK_BYTES):
        block = content[begin : begin + BLOCK_BYTES]
        words = -(-len(block) // WORD_BYTES)
        filled = room[: words * WORD_BYTES]
        filled[-WORD_BYTES:] = 0
        filled[: len(block)] = block  # tensors need not begin at a whole word
        values = filled.view(torch.int32).to(torch.int64)
        first = begin // WORD_BYTES + 1
        a += values.sum()
        b += (values * torch.arange(first, first + words, device=content.device)).sum()
    return b"".join(int(each).to_bytes(8, "little", signed=True) for each in (a, b))
