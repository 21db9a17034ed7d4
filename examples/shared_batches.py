"""Sends micro-batches and texts from rank 0 of a trainer to the other ranks of torch.distributed, as tensors.

Called on every rank. Without torch.distributed there is one rank, which gets what it gives.
"""

import torch
import torch.distributed as dist

Batch = dict[str, torch.Tensor]
_TYPES = {"responses": torch.long, "behaviour": torch.float32, "mask": torch.int8, "advantages": torch.float32}
_TEXT_BYTES = 4096


def share(batch: Batch | None, device: torch.device) -> Batch | None:
    """The part of rank 0's ``batch`` that this rank trains on; None if rank 0 has none. The others pass None.

    A rank without rows gets one with an empty mask, so that all ranks make the same passes.
    """
    sizes = torch.zeros(3, dtype=torch.long, device=device)
    if batch is not None:
        sizes = torch.tensor([*batch["responses"].shape, len(batch["prompt"])], device=device)
    rows, longest, prompt = _from_leader(sizes).tolist()
    if not rows:
        return None
    shapes = {name: (rows, 1 if name == "advantages" else longest) for name in _TYPES}
    whole = {}
    for name, dtype in {**_TYPES, "prompt": torch.long}.items():
        empty = torch.empty(shapes.get(name, (prompt,)), dtype=dtype, device=device)
        whole[name] = _from_leader(empty if batch is None else batch[name].to(device, dtype).contiguous())
    rank, count = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mine = {name: whole[name][rank::count] if rank < rows else whole[name][:1] for name in _TYPES}
    if rank >= rows:
        mine["mask"] = torch.zeros_like(mine["mask"])
    return {**mine, "prompt": whole["prompt"]}


def told(text: str, device: torch.device) -> str:
    """Rank 0's text, of at most 4,096 bytes."""
    content = torch.zeros(_TEXT_BYTES, dtype=torch.uint8, device=device)
    content[: len(text.encode())] = torch.tensor(list(text.encode()), dtype=torch.uint8)
    return bytes(_from_leader(content).tolist()).rstrip(b"\0").decode()


def total(value: float, device: torch.device) -> float:
    """The sum over all ranks."""
    found = torch.tensor(float(value), dtype=torch.float32, device=device)
    if dist.is_initialized():
        dist.all_reduce(found)
    return float(found)


def _from_leader(tensor: torch.Tensor) -> torch.Tensor:
    if dist.is_initialized():
        dist.broadcast(tensor, 0)
    return tensor
