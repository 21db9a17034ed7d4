"""The loop of ``grpo_loop.py`` on several ranks: FSDP2 shards the model and the optimizer.

    torchrun --standalone --nproc-per-node 2 examples/fsdp2_loop.py --address 127.0.0.1:7070 --groups 16 --steps 100

The token comes from the environment variable DORA_TOKEN. Rank 0 attaches, gives each rank its part of the rows, and
commits; the ranks gather a version one tensor at a time. Without GPUs the ranks use gloo.
"""

import argparse
import contextlib
import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
from grpo_loop import GRADIENT_NORM_MAX, micro_batches, policy_gradient
from shared_batches import share, told, total
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import dora
import dora.sync
from dora.data.trajectory import TrajectoryGroup
from dora.errors import DoraError

ROWS = 16  # responses in a micro-batch


def load(folder: str, device: torch.device) -> torch.nn.Module:
    """The model, sharded over the ranks: one unit per decoder layer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    for layer in model.get_decoder().layers:
        fully_shard(layer)
    return fully_shard(model)


def add_gradients(model: torch.nn.Module, device: torch.device, groups: Iterable[TrajectoryGroup]) -> float:
    """The gradient of the mean loss over a step's tokens, and their number. Rank 0 passes the step, the others ()."""
    batches = (batch for group in groups for batch in micro_batches(group, ROWS))
    tokens = 0.0
    while (part := share(next(batches, None), device)) is not None:
        policy_gradient(model, part).backward()
        tokens += float(part["mask"].sum())
    tokens = total(tokens, device)
    for parameter in model.parameters():
        if parameter.grad is not None:  # FSDP2 has averaged the ranks' sums
            parameter.grad *= dist.get_world_size() / max(tokens, 1.0)
    return tokens


def train(options: argparse.Namespace, token: str, device: torch.device) -> None:
    """Trains ``options.steps`` steps, or until the prompts end."""
    with contextlib.ExitStack() as stack:
        trainer, folder = None, ""
        if dist.get_rank() == 0:
            trainer = stack.enter_context(dora.sync.Trainer(options.address, token=token, name="fsdp2"))
            attachment = trainer.attach(groups=options.groups)
            folder = options.model or f"{attachment.store_folder}/versions/{attachment.next_step}"
        model = load(told(folder, device), device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
        steps = trainer.steps() if trainer is not None else iter(())
        for _ in range(options.steps):
            step = next(steps, None)
            if not told(str(step or ""), device):
                break
            tokens = add_gradients(model, device, step or ())
            clipped = torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM_MAX)
            norm = float(clipped.full_tensor() if isinstance(clipped, DTensor) else clipped)  # no group had a signal
            optimizer.step()
            optimizer.zero_grad()
            if step is None:
                dora.AllRanks(model).take_part()
            else:
                step.commit(weights=dora.AllRanks(model), metrics={"gradient_norm": norm, "tokens": tokens})
                print(f"step {step.number}: gradient_norm {norm:.4g}, tokens {tokens:.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--address", default="127.0.0.1:7070", help="host:port of the service")
    parser.add_argument("--groups", type=int, default=0, help="prompt groups in a step; 0: the service's number")
    parser.add_argument("--steps", type=int, default=100, help="%(default)s, or until the prompts end")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--model", default="", help="weights to begin with, on another host than the service's")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    try:
        train(options, os.environ.get("DORA_TOKEN", ""), device)
    except DoraError as error:
        raise SystemExit(f"error: {error}") from error
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
