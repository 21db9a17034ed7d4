"""The loop of docs/bring-your-own.md on several ranks (DDP), with the ``my_loss.py`` of that page:

    torchrun --standalone --nproc-per-node 2 ddp_loop.py

One rank attaches, distributes the groups as tensors, and commits. A step's number of groups must be a multiple of the
ranks.
"""

import os

import torch
import torch.distributed as dist
from my_loss import batch_of, grpo_loss
from safetensors.torch import load, save
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

import dora.sync

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
leader = dora.sync.Trainer("127.0.0.1:7070", token=os.environ["DORA_TOKEN"]).open() if rank == 0 else None


def shared(raw=b""):
    """The first rank's bytes, at every rank."""
    size = torch.tensor(len(raw))
    dist.broadcast(size, 0)
    sent = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if leader else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(sent, 0)
    return sent.numpy().tobytes()


def parts_of(groups):
    return {f"{i}/{name}": part for i, group in enumerate(groups) for name, part in batch_of(group).items()}


attached = leader.attach(groups=16) if leader else None
folder = shared(os.fsencode(attached.store_folder / "versions" / str(attached.next_step)) if leader else b"").decode()
model = DistributedDataParallel(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
steps = leader.steps() if leader else None
while True:
    step = next(steps, None) if leader else None
    parts = load(shared(save(parts_of(step or [])) if leader else b""))
    batches = {}
    for name, part in parts.items():
        index, _, name = name.partition("/")
        batches.setdefault(int(index), {})[name] = part
    mine = [batches[index] for index in range(rank, len(batches), ranks)]
    if not mine:
        break
    (sum(grpo_loss(model, batch) for batch in mine) / len(mine)).backward()  # DDP averages over the ranks
    optimizer.step()
    optimizer.zero_grad()
    if leader:
        step.commit(weights=model)
if leader:
    leader.close()
dist.destroy_process_group()
