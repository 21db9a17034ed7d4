"""An image in the memory of a GPU, shared by CUDA IPC: the trainer's end, and that of an engine of its host.

torch's way of sharing tensors between processes carries the parts (torch/multiprocessing/reductions.py); here they
travel as plain data.
"""

import base64
import os
from typing import TYPE_CHECKING, Any, Final

from dora.weights.image import ImageRefused, Place

if TYPE_CHECKING:
    import torch

KIND: Final = "cuda"
ALLOCATOR: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # variables, the second torch's former name
SPARE_SHARE: Final = 0.05  # of a GPU's memory that an image leaves free
_NUMBERS: Final = ("storage_bytes", "storage_offset_bytes", "counter_offset", "is_event_awaited")
_BYTES: Final = ("handle", "counter", "event")


def made(image_bytes: int, device: "torch.device") -> "tuple[torch.Tensor, Place] | None":
    """Allocates an image of so many bytes on ``device``. Returns None for another kind of device, or without room."""
    import torch

    allocators = [os.environ.get(name, "") for name in ALLOCATOR]
    if device.type != KIND or any("expandable_segments:True" in each for each in allocators):
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    if image_bytes + SPARE_SHARE * total_bytes > free_bytes:
        return None
    memory = torch.empty(image_bytes, dtype=torch.uint8, device=device)
    return memory, shared(memory)


def shared(memory: "torch.Tensor") -> Place:
    """Returns the place of ``memory``, (n,) uint8, which must live as long as others read it."""
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    parts: tuple[Any, ...] = reduce_tensor(memory)[1]
    _, _, _, offset, _, _, _, handle, size, storage_offset, _, counter, counter_offset, event, awaited = parts
    return {
        "kind": KIND,
        "gpu": str(torch.cuda.get_device_properties(memory.device).uuid),
        "offset_bytes": int(offset),
        "storage_bytes": int(size),
        "storage_offset_bytes": int(storage_offset),
        "counter_offset": int(counter_offset),
        "is_event_awaited": int(awaited),
        **{name: base64.b64encode(part).decode() for name, part in zip(_BYTES, (handle, counter, event), strict=True)},
    }


def opened(place: Place, image_bytes: int) -> "torch.Tensor":
    """Returns the memory of an image, (image_bytes,) uint8. Raises ImageRefused if this process cannot reach it."""
    import torch
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    found = {str(torch.cuda.get_device_properties(each).uuid): each for each in range(torch.cuda.device_count())}
    number, own = found.get(str(place.get("gpu"))), torch.cuda.current_device()
    if place.get("kind") != KIND or number is None:
        raise ImageRefused("gpu", place.get("gpu"), f"one that this engine sees: {', '.join(found)}")
    if number != own and not torch.cuda.can_device_access_peer(own, number):
        raise ImageRefused("gpu", place["gpu"], "one whose memory this engine's GPU reaches")
    try:
        handle, counter, event = (base64.b64decode(str(place[name]), validate=True) for name in _BYTES)
        storage_bytes, storage_offset, counter_offset, awaited = (int(place[name]) for name in _NUMBERS)
        memory: torch.Tensor = rebuild_cuda_tensor(
            torch.Tensor,
            (image_bytes,),
            (1,),
            int(place["offset_bytes"]),
            torch.UntypedStorage,
            torch.uint8,
            number,
            handle,
            storage_bytes,
            storage_offset,
            False,
            counter,
            counter_offset,
            event,
            bool(awaited),
        )
    except (KeyError, ValueError, RuntimeError) as error:
        raise ImageRefused("place", str(error), "memory of a trainer that lives") from error
    return memory
