"""Every trainer and example commits every step that a service delivers, whatever its groups lack."""

import argparse
import asyncio
import random
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from dora.data.trajectory import TrajectoryGroup
from dora.trainers.grpo import train as train_reference
from dora.trainers.options import GrpoConfig
from examples.prime_rl_batches import samples_of
from tests.contract.trainer_service import TOKEN, StartService, make_trajectory
from tests.snippets import ROOT
from tests.sweeps import some_of

SEED = 7
NAN = float("nan")
# Of each kind: the lengths of the responses, their rewards, and whether an environment gave their first tokens.
KINDS: dict[str, tuple[tuple[int, ...], tuple[float, ...], bool]] = {
    "no signal": ((3, 4), (1.0, 1.0), False),
    "all invalid": ((3, 4), (NAN, NAN), False),
    "one valid": ((3, 4), (1.0, NAN), False),
    "empty": ((0, 0), (0.0, 1.0), False),
    "one empty": ((0, 4), (0.0, 1.0), False),
    "one token": ((1, 1), (0.0, 1.0), False),
    "one response": ((3,), (1.0,), False),
    "one response of one token": ((1,), (0.0,), False),
    "a turn after given tokens": ((3, 4), (0.0, 1.0), True),
    "given tokens alone": ((2, 2), (0.0, 1.0), True),
    "large rewards": ((3, 4), (-1e6, 1e6), False),
    "usual": ((3, 4), (0.0, 1.0), False),
}
STEPS = len(KINDS) + 6  # whole steps of each kind, then mixed ones


def odd_group(step: int, number: int, _size: int) -> TrajectoryGroup:
    names = list(KINDS)
    name = names[step] if step < len(names) else random.Random(f"{SEED} {step} {number}").choice(names)
    lengths, rewards, is_given = KINDS[name]
    members = []
    for index, (length, reward) in enumerate(zip(lengths, rewards, strict=True)):
        given = min(2, length) if is_given else 0
        about = {
            "response_token_ids": list(range(10, 10 + length)),
            "logprobs": [0.0] * given + [-1.0] * (length - given),
            "loss_mask": [0] * given + [1] * (length - given),
            "length_tokens": length,
            "worker_history": (),
            "reward": reward,
            "reward_valid": reward == reward,
        }
        members.append(make_trajectory(step, number, index, len(lengths), **about))
    return TrajectoryGroup(f"s{step}-g{number}", tuple(members))


@pytest.fixture(autouse=True)
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples import each other, as files of one folder."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


def options(address: str, groups: int) -> argparse.Namespace:
    return argparse.Namespace(address=address, groups=groups, steps=STEPS, rows=2, lr=1e-3, device="cpu", model="")


def loop(address: str, groups: int, _folder: Path) -> None:
    import_module("grpo_loop").train(options(address, groups), TOKEN)


def accelerate(address: str, groups: int, _folder: Path) -> None:
    import_module("accelerate_loop").train(options(address, groups), TOKEN)


def fsdp2(address: str, groups: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=0, world_size=1)
    try:
        import_module("fsdp2_loop").train(options(address, groups), TOKEN, torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def reference(address: str, groups: int, _folder: Path) -> None:
    asyncio.run(train_reference(GrpoConfig(address, TOKEN, groups=groups, steps=STEPS, threads=1)))


@pytest.mark.parametrize("groups", some_of((2, 1), 2))
@pytest.mark.parametrize("trainer", [loop, accelerate, pytest.param(fsdp2, marks=pytest.mark.full), reference])
async def test_each_odd_step_is_committed_with_finite_weights(
    start_service: StartService, tmp_path: Path, tiny_dense: Path, trainer: Callable[..., Any], groups: int
) -> None:
    running = await start_service(tmp_path / "store", tiny_dense)
    running.service.group_of = odd_group
    await asyncio.to_thread(trainer, running.address, groups, tmp_path)
    assert [commit.version for commit in running.service.commits] == list(range(1, STEPS + 1))
    for commit in running.service.commits:
        assert all(abs(value) < float("inf") for value in commit.metrics.values()), dict(commit.metrics)
    last = load_file(running.service.store.folder(STEPS) / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in last.values())


def test_samples_for_other_trainers_are_aligned_in_each_odd_step() -> None:
    for step in range(STEPS):
        group = odd_group(step, 0, 2)
        for each in samples_of(group, "task"):
            assert len({len(each[name]) for name in ("token_ids", "mask", "logprobs", "advantages")}) == 1
            assert all(abs(value) < float("inf") for value in each["advantages"])
