"""A complete GRPO trainer in one file: torch, transformers and dora.sync.

    python examples/grpo_loop.py --address 127.0.0.1:7070 --groups 16 --steps 100

The token comes from the environment variable DORA_TOKEN. The service samples groups of responses, scores them, and
delivers them as token ids with the log probabilities under which they were sampled. The loop computes the clipped
policy-gradient loss, makes one optimizer step, and commits the new weights as the next version.

It trains on one device and keeps no checkpoint of the optimizer. ``python -m dora.trainers.grpo`` adds both, and packs
rows without padding.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import dora.sync
from dora.data.trajectory import TrajectoryGroup
from dora.errors import DoraError, VersionRejected

CLIP_LOW, CLIP_HIGH = 0.2, 0.28  # the importance ratio stays within 1 - CLIP_LOW and 1 + CLIP_HIGH (DAPO)
GRADIENT_NORM_MAX = 1.0


def response_logprobs(model: torch.nn.Module, prompt: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
    """The log probability of each response token: (rows, longest), for responses that are padded on the right.

    The mask of the loss excludes the padding. Attention is causal, so padding on the right changes no earlier token.
    """
    tokens = torch.cat([prompt.expand(len(responses), -1), responses], dim=1)
    logits = model(tokens).logits[:, len(prompt) - 1 : -1].float()
    chosen = logits.gather(-1, responses[..., None])[..., 0]
    return chosen - logits.logsumexp(dim=-1)  # of the raw model, as the service records them


def micro_batches(group: TrajectoryGroup, rows: int) -> Iterator[dict[str, torch.Tensor]]:
    """A group as tensors, at most ``rows`` responses at a time. A group without a learning signal yields nothing."""
    advantages = group.advantages()  # reward less the group's mean, over its standard deviation
    trainable = np.flatnonzero(group.rewards_valid)  # the verifier failed for the others
    if not advantages.any():
        return
    arrays = {"responses": group.tokens(), "behaviour": group.logprobs(), "mask": group.loss_mask()}
    for first in range(0, len(trainable), rows):
        chosen = trainable[first : first + rows]
        longest = max(int(group.lengths[chosen].max()), 1)
        batch = {name: torch.from_numpy(array[chosen, :longest]) for name, array in arrays.items()}
        yield {
            **batch,
            "responses": batch["responses"].long(),
            "prompt": torch.from_numpy(group.prompt_token_ids).long(),
            "advantages": torch.from_numpy(advantages[chosen])[:, None],
        }


def policy_gradient(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The sum of the clipped loss over the batch's response tokens.

    ``behaviour`` is the policy version that sampled the response. The ratio to it bounds two differences at once: the
    training steps since that version, and the rounding between the engine and this model.
    """
    logprobs = response_logprobs(model, batch["prompt"], batch["responses"])
    ratio = (logprobs - batch["behaviour"]).exp()
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    gain = torch.minimum(ratio * batch["advantages"], clipped * batch["advantages"])
    return -(gain * batch["mask"]).sum()


def train(options: argparse.Namespace, token: str) -> list[dict[str, float]]:
    """Trains ``options.steps`` steps, or until the prompts end. Returns the metrics of each step."""
    history: list[dict[str, float]] = []
    with dora.sync.Trainer(options.address, token=token, name="grpo-loop") as trainer:
        attachment = trainer.attach(groups=options.groups)
        folder = options.model
        if not folder:
            if attachment.store_folder is None:
                raise SystemExit("The service runs on another host: name a copy of its newest weights with --model.")
            folder = attachment.store_folder / "versions" / str(attachment.next_step)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(options.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
        for step in trainer.steps():
            tokens, loss_sum, rewards = 0, 0.0, []
            while (group := published(trainer, model, partial(next, step, None))) is not None:
                rewards.extend(group.rewards[group.rewards_valid])
                for batch in micro_batches(group, options.rows):  # while the step's other groups are still sampled
                    batch = {name: tensor.to(options.device) for name, tensor in batch.items()}
                    loss = policy_gradient(model, batch)
                    loss.backward()
                    tokens += int(batch["mask"].sum())
                    loss_sum += loss.item()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= max(tokens, 1)  # a mean over the step's tokens, however it was cut into batches
            norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM_MAX))
            if not np.isfinite(norm):
                raise SystemExit(f"Step {step.number} is not committed: its gradient is not finite.")
            optimizer.step()
            optimizer.zero_grad()
            metrics = {
                "reward": float(np.mean(rewards)) if rewards else 0.0,
                "loss": loss_sum / max(tokens, 1),
                "gradient_norm": norm,
                "tokens": float(tokens),
            }
            published(trainer, model, partial(step.commit, weights=model, metrics=metrics))
            history.append(metrics)
            print(f"step {step.number}:", ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
            if len(history) == options.steps:
                break
        published(trainer, model, trainer.settled)  # waits for the last commit, which continues in the background
    return history


def published(trainer: dora.sync.Trainer, model: torch.nn.Module, call: Callable[[], Any]) -> Any:
    """Returns call(). If the workers rejected a version, publishes it again once: a second rejection is raised."""
    try:
        return call()
    except VersionRejected as rejected:
        trainer.republish(model, version=rejected.version)
        return call()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--address", default="127.0.0.1:7070", help="host:port of the service")
    parser.add_argument("--groups", type=int, default=0, help="prompt groups in a step; 0: the service's number")
    parser.add_argument("--steps", type=int, default=0, help="0: until the prompts end")
    parser.add_argument("--rows", type=int, default=16, help="responses in a micro-batch")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="", help="weights to begin with; default: the service's newest version")
    try:
        train(parser.parse_args(), os.environ.get("DORA_TOKEN", ""))
    except DoraError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
