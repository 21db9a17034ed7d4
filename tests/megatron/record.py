"""A recorded list of trajectories: the same stream for every trainer that is compared."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from dora.data.trajectory import Trajectory, TrajectoryGroup
from dora.data.types import RoutingShape
from dora.trainers.packing import packed_logprobs, prepare
from dora.trainers.router_replay import RouterReplay
from tests.contract.trainer_service import make_trajectory

GROUP_SIZE = 4


def write_record(
    file: Path, model: Path, steps: int, groups: int, seed: int = 0, shape: RoutingShape | None = None
) -> None:
    """Random responses and rewards, with the model's logprobs, a little off as another engine's are; JSON lines.

    ``shape``: each token is sent to random experts; half of a group's samples have read their prompt elsewhere.
    """
    chosen = np.random.default_rng(seed)
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    prepare(module)
    routers = RouterReplay(module)
    vocab_size = module.config.vocab_size
    with file.open("w") as stream, torch.no_grad():
        for step in range(steps):
            for group in range(groups):
                readings = [2 * (step * groups + group) + each for each in range(2)]
                prompt = chosen.integers(3, vocab_size, chosen.integers(2, 9)).tolist()
                members = []
                for sample in range(GROUP_SIZE):
                    length = int(chosen.integers(1, 25))
                    tokens = chosen.integers(3, vocab_size, length)
                    values = {
                        "prompt_token_ids": prompt,
                        "response_token_ids": tokens,
                        "logprobs": np.zeros(length),
                        "loss_mask": np.ones(length, np.uint8),
                        "length_tokens": length,
                        "worker_history": (),
                        "reward": float(chosen.integers(0, 3)),
                    }
                    if shape is not None:
                        prompt_rows = experts(readings[sample % 2], len(prompt), shape)
                        own_rows = experts(1000 + len(members) + 10 * readings[0], length - 1, shape)
                        values["routed_experts"] = np.concatenate([prompt_rows, own_rows])
                    members.append(make_trajectory(step, group, sample, GROUP_SIZE, **values))
                found = packed_logprobs(module, members, routers).numpy()
                noisy = found + chosen.normal(0, 0.05, len(found))
                ends = np.cumsum([member.length_tokens for member in members])[:-1]
                for member, logprobs in zip(members, np.split(noisy, ends), strict=True):
                    member.logprobs[:] = logprobs
                    stream.write(json.dumps(member.to_json_dict()) + "\n")


def experts(seed: int, tokens: int, shape: RoutingShape) -> np.ndarray:
    ids = np.random.default_rng(seed).random((tokens, shape.layers, shape.experts)).argsort(axis=-1)
    return ids[..., : shape.top_k].astype(np.uint8)


def read_record(file: Path) -> Iterator[list[TrajectoryGroup]]:
    """Its steps, each with its groups."""
    steps: dict[int, dict[str, list[Trajectory]]] = {}
    with file.open() as stream:
        for line in stream:
            trajectory = Trajectory.from_json_dict(json.loads(line))
            steps.setdefault(trajectory.trained_step, {}).setdefault(trajectory.group_id, []).append(trajectory)
    for groups in steps.values():
        yield [TrajectoryGroup(group_id, tuple(members)) for group_id, members in groups.items()]
