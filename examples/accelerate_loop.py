"""The loop of ``grpo_loop.py`` with Hugging Face Accelerate: its devices, processes and mixed precision.

    accelerate launch examples/accelerate_loop.py --address 127.0.0.1:7070 --groups 16 --steps 100

The token comes from the environment variable DORA_TOKEN. The main process attaches, gives each process its part of the
rows, and commits. For models that one device cannot hold, see ``fsdp2_loop.py``.
"""

import argparse
import contextlib
import os

import torch
from accelerate import Accelerator
from grpo_loop import GRADIENT_NORM_MAX, micro_batches, policy_gradient
from shared_batches import share, told, total
from transformers import AutoModelForCausalLM

import dora.sync
from dora.errors import DoraError

ROWS = 16  # responses in a micro-batch


def train(options: argparse.Namespace, token: str) -> None:
    """Trains ``options.steps`` steps, or until the prompts end. Called in every process."""
    accelerator = Accelerator()
    device = accelerator.device
    with contextlib.ExitStack() as stack:
        trainer, folder = None, ""
        if accelerator.is_main_process:
            trainer = stack.enter_context(dora.sync.Trainer(options.address, token=token, name="accelerate"))
            attachment = trainer.attach(groups=options.groups)
            folder = options.model or f"{attachment.store_folder}/versions/{attachment.next_step}"
        model = AutoModelForCausalLM.from_pretrained(told(folder, device), dtype=torch.float32)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=options.lr))
        steps = trainer.steps() if trainer is not None else iter(())
        for _ in range(options.steps):
            step = next(steps, None)
            if not told(str(step or ""), device):
                break
            batches, tokens = (batch for group in step or () for batch in micro_batches(group, ROWS)), 0.0
            while (part := share(next(batches, None), device)) is not None:
                accelerator.backward(policy_gradient(model, part))
                tokens += float(part["mask"].sum())
            tokens = total(tokens, device)
            for parameter in model.parameters():
                if parameter.grad is not None:  # the processes' sums were averaged
                    parameter.grad *= accelerator.num_processes / max(tokens, 1.0)
            norm = float(accelerator.clip_grad_norm_(model.parameters(), GRADIENT_NORM_MAX))
            optimizer.step()
            optimizer.zero_grad()
            if step is not None:
                metrics = {"gradient_norm": norm, "tokens": tokens}
                step.commit(weights=accelerator.unwrap_model(model), metrics=metrics)
                print(f"step {step.number}: gradient_norm {norm:.4g}, tokens {tokens:.0f}", flush=True)
    accelerator.end_training()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--address", default="127.0.0.1:7070", help="host:port of the service")
    parser.add_argument("--groups", type=int, default=0, help="prompt groups in a step; 0: the service's number")
    parser.add_argument("--steps", type=int, default=100, help="%(default)s, or until the prompts end")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--model", default="", help="weights to begin with, on another host than the service's")
    try:
        train(parser.parse_args(), os.environ.get("DORA_TOKEN", ""))
    except DoraError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
