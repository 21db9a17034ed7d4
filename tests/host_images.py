"""Images in files that processes map, in place of a GPU's memory: the same notes, locks, checksums and order of events.

A file's name ends with the id of its trainer's process, and the file counts as gone once that process has ended.
"""

import itertools
import os
import tempfile
from pathlib import Path

import torch

from dora.weights.image import ImageRefused, Place

MEMORY: dict[int, torch.Tensor] = {}  # those of this process, by number
_NUMBERS = itertools.count()


def made(image_bytes: int, device: torch.device) -> tuple[torch.Tensor, Place]:
    number = next(_NUMBERS)
    descriptor, name = tempfile.mkstemp(suffix=f".{os.getpid()}")
    os.close(descriptor)
    MEMORY[number] = torch.from_file(name, shared=True, size=image_bytes, dtype=torch.uint8)
    return MEMORY[number], {"kind": "host", "number": number, "path": name}


def opened(place: Place, image_bytes: int) -> torch.Tensor:
    path = Path(str(place["path"]))
    process_id = int(path.suffix[1:])
    is_gone = place["number"] not in MEMORY if process_id == os.getpid() else not Path(f"/proc/{process_id}").exists()
    if is_gone:
        path.unlink(missing_ok=True)
        raise ImageRefused("place", str(path), "memory of a trainer that lives")
    return torch.from_file(str(path), shared=True, size=image_bytes, dtype=torch.uint8)
