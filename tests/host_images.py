"""Images in unnamed files that processes map, in place of a GPU's memory: the same notes, locks, checksums and order of
events. A file goes with the trainer's process.
"""

import itertools
import os

import torch

from dora.weights.image import ImageRefused, Place

MEMORY: dict[int, torch.Tensor] = {}  # those of this process, by number
_NUMBERS = itertools.count()


def made(image_bytes: int, device: torch.device) -> tuple[torch.Tensor, Place]:
    number, descriptor = next(_NUMBERS), os.memfd_create("image")
    os.ftruncate(descriptor, image_bytes)
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    MEMORY[number] = torch.from_file(path, shared=True, size=image_bytes, dtype=torch.uint8)
    return MEMORY[number], {"kind": "host", "number": number, "path": path}


def opened(place: Place, image_bytes: int) -> torch.Tensor:
    path = str(place["path"])
    if path.startswith(f"/proc/{os.getpid()}/") and place["number"] not in MEMORY:
        raise ImageRefused("place", path, "memory of a trainer that lives")
    try:
        return torch.from_file(path, shared=True, size=image_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise ImageRefused("place", path, f"memory of a trainer that lives ({error})") from error
