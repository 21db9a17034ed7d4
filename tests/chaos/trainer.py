"""A trainer that says what it is at, to be killed there: ``python -m tests.chaos.trainer ADDRESS GROUPS ENGINE``.

It prints lines of JSON, each with ``at``: taking (a group has come), committing (the weights are being copied),
publishing (they are copied; the rest of the commit goes on by itself), committed. The weights of a version follow from
its number alone, so that a trainer that follows a killed one publishes the same.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

import dora

STEP_SIZE = 1e-3  # between two versions, of each weight
RECONNECT_S = 120.0


async def main(address: str, groups: int, engine: str) -> None:
    async with dora.Trainer(address, token=os.environ["DORA_TOKEN"], reconnect_s=RECONNECT_S) as trainer:
        attachment = await trainer.attach(groups)
        weights = _Module(Path(attachment.model)) if engine == "vllm" else _Tensors(Path(attachment.model))
        committing: tuple[int, list[str]] | None = None
        async for step in trainer.steps():
            if committing is not None:  # steps() has waited for that
                say("committed", *committing)
            group_ids = []
            async for group in step:
                group_ids.append(group.group_id)
                say("taking", step.number, group_ids)
            if not group_ids:
                break
            say("committing", step.number, group_ids)
            await step.commit(weights=weights.of(step.number + 1))
            committing = (step.number, group_ids)
            say("publishing", *committing)
        await trainer.settled()
        if committing is not None:
            say("committed", *committing)


def say(at: str, step: int, group_ids: list[str]) -> None:
    print(json.dumps({"at": at, "step": step, "group_ids": group_ids}), flush=True)


class _Tensors:
    """By their names, for engines that do not compute with them."""

    def __init__(self, model: Path) -> None:
        self._tensors = {
            name: tensor for file in sorted(model.glob("*.safetensors")) for name, tensor in load_file(file).items()
        }

    def of(self, version: int) -> Any:
        name = min(self._tensors)
        return self._tensors | {name: self._tensors[name] + np.asarray(version * STEP_SIZE, self._tensors[name].dtype)}


class _Module:
    """A torch module, from which the client computes the canary."""

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self._torch = torch
        self._module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._first = {name: each.detach().clone() for name, each in self._module.named_parameters()}

    def of(self, version: int) -> Any:
        torch = self._torch
        chance = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for name, each in self._module.named_parameters():
                each.copy_(self._first[name] + STEP_SIZE * torch.randn(each.shape, generator=chance))
        return self._module


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
