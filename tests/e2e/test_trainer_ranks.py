"""The reference trainer on two ranks: the steps of one, one commit, and checkpoints that any number of ranks reads."""

import asyncio
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dora.data.trajectory import TrajectoryGroup
from dora.data.types import RoutingShape
from dora.errors import Conflict, InvalidValue
from dora.models import routing
from dora.models.tiny import TinyKind, make_tiny
from dora.trainers.checkpoint import KEPT, CheckpointPosition, path_of, position_of, steps_in
from dora.trainers.grpo import train
from dora.trainers.learner import Learner, LearnerConfig, StepMetrics
from dora.trainers.objectives.presets import objective
from dora.trainers.options import GrpoConfig
from dora.trainers.ranks import Ranks, joined
from dora.trainers.start import Start, make_learner
from tests.contract.trainer_service import TOKEN, Running, StartService, make_trajectory
from tests.private_token import with_token
from tests.refusals import refused
from tests.trainer_ranks import ended, start_ranks

LEARNING_RATE = 0.01
CONFIG = LearnerConfig(
    learning_rate=1e-2, micro_batch_tokens=24, objective=objective("grpo", kl_coefficient=0.1), packing=True
)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("dense", tmp_path_factory.mktemp("models") / "tiny")


def groups_of(step: int, shape: RoutingShape | None = None) -> list[TrajectoryGroup]:
    """Several of unlike lengths; one; one that teaches nothing. ``shape``: with routed experts of it."""
    sizes = {0: ((3, 9, 1, 14), (2, 2), (30, 4, 7)), 1: ((5, 6),), 2: ((4, 4),)}[step % 3]
    dice = np.random.default_rng(step)
    found = []
    for number, lengths in enumerate(sizes):
        members = tuple(
            make_trajectory(
                step,
                number,
                sample,
                group_size=len(lengths),
                response_token_ids=dice.integers(0, 64, length),
                logprobs=np.full(length, -3.0),
                loss_mask=[1] * length,
                length_tokens=length,
                worker_history=(),
                staleness=number,
                reward=0.0 if step % 3 == 2 else float(sample % 2),
                routed_experts=shape and experts(dice, 2 + length - 1, shape),
            )
            for sample, length in enumerate(lengths)
        )
        found.append(TrajectoryGroup(f"s{step}-g{number}", members))
    return found


def experts(dice: np.random.Generator, tokens: int, shape: RoutingShape) -> np.ndarray:
    ids = dice.random((tokens, shape.layers, shape.experts)).argsort(axis=-1)
    return ids[..., : shape.top_k].astype(np.uint8)


def learner_of(folder: Path, ranks: Ranks, config: LearnerConfig = CONFIG) -> Learner:
    module, reference = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    return Learner(module, config, reference=reference, ranks=ranks)


def steps_of(learner: Learner, steps: Sequence[int], shape: RoutingShape | None = None) -> list[StepMetrics]:
    found = []
    for step in steps:
        for group in groups_of(step, shape):
            learner.add_group(group)
            learner.work_once()
        found.append(learner.finish_step())
    return found


def whole_run(folder: Path, out: Path, config: LearnerConfig, shape: RoutingShape | None) -> None:
    """On two ranks: three steps, a checkpoint, three more steps."""
    with joined(60.0) as ranks:
        learner = learner_of(folder, ranks, config)
        if not ranks.leads:
            learner.follow()
            return
        metrics = steps_of(learner, range(3), shape)
        learner.save(out, 0, learner.weights())
        metrics += steps_of(learner, range(3, 6), shape)
        learner.save(out, 0, learner.weights())
        ranks.tell("end")
    for each in metrics:
        print(f"{each.loss!r} {each.grad_norm!r} {each.signals.numbers()!r} {sorted(each.by_staleness)!r}")


@pytest.mark.parametrize("packing", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", ["dense", pytest.param("moe", marks=pytest.mark.full)])
def test_two_ranks_make_the_steps_of_one(kind: TinyKind, tmp_path: Path, packing: bool) -> None:
    """The mixture of experts replays routed experts."""
    model_folder = make_tiny(kind, tmp_path / kind)
    shape = routing(model_folder) if kind == "moe" else None
    config = replace(CONFIG, packing=packing)
    ranks = start_ranks(2, tmp_path, whole_run, model_folder, tmp_path / "two", config, shape)
    alone = learner_of(model_folder, Ranks(), config)
    expected = steps_of(alone, range(3), shape)
    alone.save(tmp_path / "one", 0, alone.weights())
    expected += steps_of(alone, range(3, 6), shape)
    alone.save(tmp_path / "one", 0, alone.weights())
    assert ended(ranks) == [0, 0], ranks[0].text() + ranks[1].text()
    lines = [line for line in ranks[0].text().splitlines() if "tokens_trained" in line]
    for line, each in zip(lines, expected, strict=True):
        loss, norm, signals = line.split(" ", 2)
        assert (float(loss), float(norm)) == pytest.approx((each.loss, each.grad_norm), rel=1e-4, abs=1e-6)
        assert signals.endswith(repr(sorted(each.by_staleness)))
        found = {name: float(value) for name, value in re.findall(r"'(\w+)': ([-\d.e+]+)", signals)}
        assert found == pytest.approx({**each.signals.numbers(), "queued_s": found["queued_s"]}, rel=1e-3, abs=1e-4)
    names = load_file(model_folder / "model.safetensors").keys()
    for step in (3, 6):
        one, two = path_of(tmp_path / "one", step), path_of(tmp_path / "two", step)
        assert position_of(one) == position_of(two) == CheckpointPosition(step, 0)
        for file in ("model.safetensors", "optimizer.safetensors"):
            mine, theirs = load_file(one / file), load_file(two / file)
            assert mine.keys() == theirs.keys()
            assert file != "model.safetensors" or mine.keys() == names
            for name in mine:  # Adam divides a gradient of about 0 by itself: single numbers are rounding
                assert (mine[name] - theirs[name]).norm() <= 2e-3 * mine[name].norm() + 1e-4, name


def test_what_is_gone_on_from_is_what_was_left(model_folder: Path, tmp_path: Path) -> None:
    """To the last bit: weights, moments and the reference. By one rank from what one has written."""
    straight = learner_of(model_folder, Ranks())
    steps_of(straight, range(3))
    straight.save(tmp_path, 0, straight.weights())
    expected = steps_of(straight, range(3, 6))
    service = ("127.0.0.1:1", TOKEN)
    checkpoint = str(path_of(tmp_path, 3))
    start = Start(3, checkpoint, checkpoint, str(model_folder), 0)
    again = make_learner(GrpoConfig(*service, learner=CONFIG), start, Ranks())
    assert again.step == 3
    found = steps_of(again, range(3, 6))
    assert [(each.loss, each.grad_norm) for each in found] == [(each.loss, each.grad_norm) for each in expected]
    for (name, one), other in zip(
        straight.module.state_dict().items(), again.module.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other), name


@pytest.fixture
async def services(start_service: StartService, model_folder: Path, tmp_path: Path) -> tuple[Running, Running]:
    return await start_service(tmp_path / "one", model_folder), await start_service(tmp_path / "other", model_folder)


@pytest.mark.full  # two runs, one after the other
async def test_a_run_of_two_ranks_is_gone_on_with_by_one(
    services: tuple[Running, Running], model_folder: Path, tmp_path: Path
) -> None:
    """Under torchrun: each rank takes its part of every leased batch, one commits, Hugging Face names are written once.

    A run that is interrupted ends at the weights of one that is not, and with the reference of the record.
    """
    service, other = services
    kl = ("--objective", "grpo", "--kl-coefficient", "0.5")
    where = ("--address", service.address, "--token-file", with_token(TOKEN))
    given = (*where, "--groups", "2", "--lr", str(LEARNING_RATE), *kl)
    checkpoints = tmp_path / "checkpoints"
    argv = ["-m", "dora.trainers.grpo", *given, "--steps", "2", "--checkpoints", str(checkpoints)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = await asyncio.create_subprocess_exec(*torchrun, *argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    out = (await process.communicate())[0].decode()
    assert process.returncode == 0, out
    assert len(re.findall(r"^step    [01]  reward 0.500", out, re.MULTILINE)) == 2, out
    assert [commit.version for commit in service.service.commits] == [1, 2]
    assert steps_in(checkpoints) == [1, 2] == list(range(3 - KEPT, 3))
    names = load_file(model_folder / "model.safetensors").keys()
    assert load_file(service.service.store.folder(2) / "model.safetensors").keys() == names

    config = GrpoConfig(
        service.address,
        TOKEN,
        groups=2,
        steps=2,
        checkpoints=str(checkpoints),
        learner=LearnerConfig(learning_rate=LEARNING_RATE, objective=objective("grpo", kl_coefficient=0.5)),
    )
    await train(config)
    await train(replace(config, address=other.address, steps=4, checkpoints=""))
    resumed, straight = (load_file(each.service.store.folder(4) / "model.safetensors") for each in (service, other))
    for name in straight:  # Adam makes steps as large as others where a gradient is its own rounding: a few elements
        beyond = (resumed[name] - straight[name]).abs() - 2e-5
        assert (beyond > 0).float().mean() < 1e-3 and beyond.max() < 0.1 * LEARNING_RATE, name


@pytest.mark.full
async def test_a_new_run_goes_on_with_the_moments_of_another(services: tuple[Running, Running], tmp_path: Path) -> None:
    """Its first step is the third one of the other run, whose groups are the same."""
    service, other = services
    config = GrpoConfig(
        service.address, TOKEN, groups=2, steps=2, checkpoints=str(tmp_path / "c"), learner=CONFIG
    )  # fmt: skip
    await train(config)
    begun = replace(config, address=other.address, steps=1, checkpoints="", begin_from=str(path_of(tmp_path / "c", 2)))
    await train(begun)
    await train(replace(config, steps=1))
    theirs, ours = (
        load_file(each.service.store.folder(version) / "model.safetensors")
        for each, version in ((service, 3), (other, 1))
    )
    for name in ours:
        assert torch.allclose(theirs[name], ours[name], atol=1e-6), name
    with refused(Conflict, field="--begin-from", names=("new service",)):
        await train(begun)


async def test_a_checkpoint_that_does_not_fit_is_refused(
    services: tuple[Running, Running], model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service, other = services
    config = GrpoConfig(service.address, TOKEN, groups=2, steps=2, checkpoints=str(tmp_path / "c"), checkpoint_every=2)
    await train(config)
    assert steps_in(tmp_path / "c") == [2]
    with refused(Conflict, field="--checkpoints", names=("2",)):
        await train(replace(config, address=other.address))
    await train(replace(config, steps=1))  # step 2, exactly
    assert not [each for each in caplog.records if "newest checkpoint" in each.getMessage()]
    await train(replace(config, steps=1))  # step 3, with the moments of step 2
    assert "the newest checkpoint is of step 2, and the service is at step 3" in caplog.text
    (path_of(tmp_path / "c", 4) / "trainer.json").write_text('{"step": 4, "reference_version": 7}')
    with refused(Conflict, field="step-4: reference_version", value=7, names=("0",)):
        await train(config)
    with refused(InvalidValue, field="checkpoint_every", value=0):
        replace(config, checkpoint_every=0)
