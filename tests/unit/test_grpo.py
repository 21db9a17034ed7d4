"""The reference trainer: its batches and gradients, and whether it learns."""

import asyncio
import copy
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from dora.data.trajectory import Trajectory, TrajectoryGroup
from dora.errors import Conflict, InvalidValue, VersionRejected
from dora.models.tiny import make_tiny
from dora.ops.verify.recompute import recomputed_logprobs
from dora.trainers.grpo import main, take_groups, train
from dora.trainers.learner import Learner, LearnerConfig
from dora.trainers.objectives.batch import Row
from dora.trainers.objectives.presets import OBJECTIVES, objective
from dora.trainers.options import GrpoConfig, multiplies_bfloat16, parse_arguments
from dora.trainers.padding import padded_batches, response_logprobs
from dora.trainers.report import step_json, step_line
from tests.contract.trainer_service import TOKEN, ScriptedService, StartService, make_group, make_trajectory
from tests.refusals import data_words, refused
from tests.sweeps import some_of

DAPO = objective("dapo")


def responses(texts: Sequence[Sequence[int]], rewards: Sequence[float], logprob: float = -1.0) -> TrajectoryGroup:
    members = tuple(
        make_trajectory(
            0,
            0,
            index,
            group_size=len(texts),
            response_token_ids=list(text),
            logprobs=[logprob] * len(text),
            loss_mask=[1] * len(text),
            length_tokens=len(text),
            worker_history=(),
            reward=reward,
            reward_valid=math.isfinite(reward),
        )
        for index, (text, reward) in enumerate(zip(texts, rewards, strict=True))
    )
    return TrajectoryGroup("s0-g0", members)


def test_padded_batches_hold_every_row_once_within_the_limit() -> None:
    rows = [
        Row(trajectory, 1.0)
        for trajectory in responses([[5] * length for length in (3, 9, 1, 4, 4, 30)], [0.0] * 6).trajectories
    ]
    batches = padded_batches(rows, tokens_max=24)
    assert sorted(row.trajectory.sample_index for batch in batches for row in batch) == list(range(6))
    for batch in batches:
        longest = max(row.length_tokens for row in batch)
        assert len(batch) == 1 or len(batch) * longest <= 24


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("dense", tmp_path_factory.mktemp("models") / "tiny")


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_padding_and_micro_batches_change_neither_logprobs_nor_gradients(model_folder: Path) -> None:
    group = responses([[5, 6, 7], [8] * 9, [9, 10]], [1.0, 0.0, 0.5])
    gradients = []
    for tokens_max in (1, 4096):
        module = load(model_folder)
        learner = Learner(module, LearnerConfig(micro_batch_tokens=tokens_max, packing=False))
        learner.add_group(group)
        learner.work()
        gradients.append([parameter.grad.clone() for parameter in module.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    together = response_logprobs(module, group.trajectories)
    for row, trajectory in enumerate(group.trajectories):
        alone = response_logprobs(module, [trajectory])[0]
        assert torch.allclose(together[row, : trajectory.length_tokens], alone, atol=1e-5)


def test_a_prompt_that_is_read_once_gives_the_logprobs_of_whole_rows(model_folder: Path) -> None:
    """``dora verify`` runs every row from its first token."""
    module = load(model_folder)
    group = responses([[5, 6, 7], [8] * 9, [9]], [1.0, 0.0, 0.5])
    found = response_logprobs(module, group.trajectories)
    for trajectory, logprobs in recomputed_logprobs(module, group.trajectories):
        shared = found[trajectory.sample_index, : trajectory.length_tokens].detach().numpy()
        assert shared == pytest.approx(logprobs, abs=1e-5)


def test_a_step_is_one_mean_over_all_its_tokens(model_folder: Path) -> None:
    """Two groups of different lengths: the gradient is that of sum / tokens, not of a mean of means."""
    groups = [responses([[5, 6], [7, 8]], [1.0, 0.0]), responses([[9] * 7, [10] * 5], [0.0, 1.0])]
    module = load(model_folder)
    total, tokens = torch.zeros(()), 0
    for group in groups:
        advantages = group.advantages()
        for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
            logprobs = response_logprobs(module, [trajectory])[0]
            ratio = (logprobs - torch.from_numpy(trajectory.logprobs)).exp()
            clipped = ratio.clamp(0.8, 1.28)
            total = total - torch.minimum(ratio * float(advantage), clipped * float(advantage)).sum()
            tokens += trajectory.length_tokens
    (total / tokens).backward()
    expected = [parameter.grad.clone() for parameter in module.parameters()]
    norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in expected))

    learner = Learner(load(model_folder), LearnerConfig(objective=DAPO, grad_norm_max=1e9))
    for group in groups:
        learner.add_group(group)
    metrics = learner.finish_step()
    assert metrics.loss == pytest.approx(float(total.detach()) / tokens, rel=1e-4)
    assert metrics.grad_norm == pytest.approx(norm, rel=1e-4)
    assert (metrics.signals.tokens_trained, metrics.groups, metrics.groups_trained) == (tokens, 2, 2)


def test_movement_is_the_divergence_of_the_step_on_its_own_tokens(model_folder: Path) -> None:
    """By hand, from the logprobs before the step and after it; half the learning rate moves a quarter as far."""
    group = responses([[5, 6, 7], [8] * 9, [9, 10]], [1.0, 0.0, 0.5])
    found = {}
    for rate in (1e-4, 5e-5):
        module = load(model_folder)
        learner = Learner(module, LearnerConfig(objective=DAPO, learning_rate=rate))
        before = torch.cat([response_logprobs(module, [each])[0] for each in group.trajectories]).detach()
        learner.add_group(group)
        found[rate] = learner.finish_step().numbers()["movement"]
        after = torch.cat([response_logprobs(module, [each])[0] for each in group.trajectories]).detach()
        moved = (after - before).double()
        assert found[rate] == pytest.approx(float((moved.exp() - 1 - moved).mean()), rel=0.02)
    assert found[1e-4] / found[5e-5] == pytest.approx(4.0, rel=0.1)


def test_a_step_without_a_learning_signal_has_no_movement(model_folder: Path) -> None:
    learner = Learner(load(model_folder), LearnerConfig())
    learner.add_group(responses([[5], [6]], [0.5, 0.5]))
    assert "movement" not in learner.finish_step().numbers()


def test_groups_that_teach_nothing_leave_the_weights_alone(model_folder: Path) -> None:
    module = load(model_folder)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    learner = Learner(module, LearnerConfig(learning_rate=0.1))
    learner.add_group(responses([[5], [6]], [0.5, 0.5]))
    learner.add_group(responses([[5], [6]], [1.0, math.nan]))
    metrics = learner.finish_step()
    assert (metrics.groups, metrics.groups_trained, metrics.signals.tokens_trained, metrics.rewards_invalid) == (
        2,
        0,
        0,
        1,
    )
    assert metrics.signals.reward_mean == pytest.approx(2 / 3)
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert "reward_mean" not in replace(metrics, signals=replace(metrics.signals, reward_mean=math.nan)).numbers()


def test_invalid_rewards_are_masked_out_of_a_group(model_folder: Path) -> None:
    with_invalid, without = Learner(load(model_folder), LearnerConfig()), Learner(load(model_folder), LearnerConfig())
    with_invalid.add_group(responses([[5, 6], [7, 8], [9] * 9], [1.0, 0.0, math.nan]))
    without.add_group(responses([[5, 6], [7, 8]], [1.0, 0.0]))
    assert with_invalid.finish_step().grad_norm == pytest.approx(without.finish_step().grad_norm, rel=1e-5)


@pytest.mark.parametrize("what", ["loss", "grad_norm"])
def test_what_is_not_finite_is_not_taken(model_folder: Path, what: str) -> None:
    module = load(model_folder)
    learner = Learner(module, LearnerConfig(learning_rate=0.1))
    learner.add_group(responses([[5], [6]], [1.0, 0.0]))
    learner.work()
    spoilt = next(module.parameters())
    spoilt.grad[0, 0] = math.inf
    if what == "loss":
        learner._sums.loss = math.nan
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with refused(InvalidValue, names=(what,)):
        learner.finish_step()
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert learner.step == 0


def test_what_cannot_be_trained_on_is_named(model_folder: Path) -> None:
    learner = Learner(load(model_folder), LearnerConfig())
    with refused(InvalidValue, field="trajectory s0-g0-0: logprobs"):
        learner.add_group(responses([[5], [6]], [1.0, 0.0], logprob=math.nan))
    with refused(InvalidValue, field="trajectory s0-g0-1: response_token_ids", value=64, names=("63",)):
        learner.add_group(responses([[5], [6, 64, 65]], [1.0, 0.0]))
    kl = LearnerConfig(objective=objective("grpo", kl_coefficient=0.1))
    with refused(Conflict, field="reference"):
        Learner(load(model_folder), kl)
    learner = Learner(load(model_folder), kl, reference=load(model_folder), reference_version=3)
    with refused(Conflict, field="trajectory s0-g0-0: reference_version", value=0, names=("3",)):
        learner.add_group(responses([[5], [6]], [1.0, 0.0]))
    masked = responses([[5, 6], [7]], [1.0, 0.0]).trajectories
    outside = replace(masked[0], logprobs=np.array([math.nan, -1.0]), loss_mask=np.array([0, 1]))
    Learner(load(model_folder), LearnerConfig()).add_group(TrajectoryGroup("s0-g0", (outside, masked[1])))


class Bandit(torch.nn.Module):
    """A policy over 8 tokens that looks at nothing: logits are its only parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.zeros(8))

    def forward(self, input_ids: torch.Tensor, logits_to_keep: int, **unused: Any) -> SimpleNamespace:
        logits = self.logits.expand(input_ids.shape[0], logits_to_keep, 8)
        return SimpleNamespace(logits=logits, past_key_values=DynamicCache())


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("kl_coefficient", some_of((0.0, 0.1), 0.1))
def test_a_bandit_learns_the_arm_that_pays(name: str, kl_coefficient: float) -> None:
    bandit = Bandit()
    chosen = objective(name, kl_coefficient=kl_coefficient)
    learner = Learner(bandit, LearnerConfig(learning_rate=0.1, objective=chosen), reference=copy.deepcopy(bandit))
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        policy = torch.log_softmax(bandit.logits.detach(), 0)
        for _ in range(4):
            arms = torch.multinomial(policy.exp(), 8, replacement=True, generator=generator).tolist()
            group = responses([[arm] for arm in arms], [float(arm == 3) for arm in arms])
            members = [replace(each, logprobs=policy.numpy()[each.response_token_ids]) for each in group.trajectories]
            learner.add_group(TrajectoryGroup(group.group_id, tuple(members)))
        learner.finish_step()
    assert float(torch.softmax(bandit.logits.detach(), 0)[3]) > 0.6


async def test_a_step_that_clips_too_much_is_committed_with_an_alarm(
    start_service: StartService, tmp_path: Path, model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The fake service's logprobs are far above the model's: responses with a negative advantage are clipped."""
    service = await start_service(tmp_path / "store", model_folder)
    loud = GrpoConfig(service.address, TOKEN, groups=2, steps=1, learner=LearnerConfig(objective=DAPO, clip_alarm=0.0))
    report = (await train(loud)).steps[0]
    sent = service.service.commits[0].metrics
    assert sent["alarm_clip_fraction"] == 0.0 < sent["clip_fraction"] == report.metrics.signals.clip_fraction
    assert sent["staleness_0/clip_fraction"] == sent["clip_fraction"] and sent["staleness_0/trajectories"] == 4.0
    assert [each.getMessage() for each in caplog.records if each.name == "dora.trainers.grpo"] == [
        f"step 0: clip_fraction {sent['clip_fraction']:.3g} is above 0"
    ]
    await train(replace(loud, learner=LearnerConfig(objective=DAPO, clip_alarm=1.0)))
    warned = [each for each in caplog.records if each.name == "dora.trainers.grpo"]
    assert "alarm_clip_fraction" not in service.service.commits[1].metrics and len(warned) == 1


async def test_the_trainer_trains_and_publishes_over_grpc(
    start_service: StartService, tmp_path: Path, model_folder: Path
) -> None:
    service = await start_service(tmp_path / "store", model_folder)
    seen = []
    config = GrpoConfig(service.address, TOKEN, groups=2, steps=2, learner=LearnerConfig(learning_rate=1e-3))
    report = await train(config, seen.append)
    assert [step.step for step in report.steps] == [0, 1] and list(report.steps) == seen
    assert report.steps[1].group_ids == ("s1-g0", "s1-g1")
    assert report.steps[0].metrics.signals.tokens_trained == 2 * (3 + 4)
    commits = service.service.commits
    assert [commit.version for commit in commits] == [1, 2] and commits[0].metrics["reward_mean"] == 0.5
    store = service.service.store
    first, second = (load(store.folder(version)).state_dict() for version in (1, 2))
    assert any(not torch.equal(first[name], second[name]) for name in first)
    assert "reward 0.500" in step_line(report.steps[0]) and '"step": 0' in step_json(report.steps[0])

    # A trainer that comes later goes on from the newest version, not from the first.
    again = await train(replace(config, steps=1, learner=LearnerConfig(learning_rate=1e-12)))
    assert again.steps[0].step == 2
    third = load(store.folder(3)).state_dict()
    assert all(torch.allclose(second[name], third[name], atol=1e-6) for name in second)


class Gates:
    """A step whose groups come when they are let through; ``ended`` after the last one."""

    def __init__(self, groups: Sequence[TrajectoryGroup]) -> None:
        self.groups = list(groups)
        self.gates = [asyncio.Event() for _ in range(len(groups) + 1)]

    async def has_groups(self) -> bool:
        await self.gates[len(self.gates) - 1 - len(self.groups)].wait()
        return bool(self.groups)

    def take(self) -> TrajectoryGroup:
        return self.groups.pop(0)


class Worked(Learner):
    """Says what it has worked on, in the thread in which it works."""

    def __init__(self, module: Any, config: LearnerConfig, on_work: Callable[[int], None]) -> None:
        super().__init__(module, config)
        self.on_work = on_work

    def work_once(self) -> bool:
        worked = super().work_once()
        self.on_work(self._sums.groups)
        return worked


async def test_a_group_is_trained_on_before_the_next_one_comes(model_folder: Path) -> None:
    groups = [responses([[5, 6], [7, 8]], [1.0, 0.0]), responses([[9] * 7, [10] * 5], [0.0, 1.0])]
    step, loop = Gates(groups), asyncio.get_running_loop()

    def on_work(groups_done: int) -> None:
        loop.call_soon_threadsafe(step.gates[groups_done].set)

    learner = Worked(load(model_folder), LearnerConfig(), on_work)
    taken: list[str] = []
    step.gates[0].set()
    with ThreadPoolExecutor(1) as thread:
        began_s = time.monotonic()
        waited_s = await take_groups(step, learner, thread, taken)  # type: ignore[arg-type]
        assert 0.0 <= waited_s <= time.monotonic() - began_s - learner.busy_s + 1e-3
    assert len(taken) == 2 and learner.finish_step().groups == 2


async def test_a_learner_that_fails_ends_the_wait_for_groups(model_folder: Path) -> None:
    step = Gates([responses([[5, 6], [7, 8]], [1.0, 0.0])])
    step.gates[0].set()  # the step's end never comes
    bandit = Bandit()  # takes no second token
    with ThreadPoolExecutor(1) as thread, refused(TypeError, names=("logits_to_keep",)):
        learner = Learner(bandit, LearnerConfig())
        await asyncio.wait_for(take_groups(step, learner, thread, []), 60.0)  # type: ignore[arg-type]


async def test_the_wait_for_the_first_group_of_a_step_is_told(
    start_service: StartService, tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_s: list[float] = []

    async def late(self: ScriptedService, request: Any, context: Any) -> AsyncIterator[Any]:
        began_s = time.monotonic()
        await asyncio.to_thread(sum, range(5_000_000))
        held_s.append(time.monotonic() - began_s)
        async for batch in at_once(self, request, context):
            yield batch

    at_once = ScriptedService.StreamStep
    monkeypatch.setattr(ScriptedService, "StreamStep", late)
    service = await start_service(tmp_path / "store", model_folder)
    report = await train(GrpoConfig(service.address, TOKEN, groups=1, steps=2))
    told = [commit.waited_s for commit in service.service.commits]
    assert told == [step.waited_s for step in report.steps]
    assert all(waited_s >= held for waited_s, held in zip(told, held_s, strict=False)) and len(told) == 2
    assert all(step.waited_s < step.seconds for step in report.steps)


async def test_a_rejected_version_is_published_anew_once(
    start_service: StartService, tmp_path: Path, model_folder: Path
) -> None:
    service = await start_service(tmp_path / "store", model_folder)
    service.service.faults.rejections = {1: 1}
    config = GrpoConfig(service.address, TOKEN, groups=2, steps=2)
    report = await train(config)
    assert [step.metrics.signals.tokens_trained for step in report.steps] == [2 * (3 + 4)] * 2, (
        "no group was trained on twice"
    )
    assert [each.version for each in service.service.republished] == [1] and len(service.service.commits) == 2
    service.service.faults.rejections = {3: 2}
    with refused(VersionRejected, field="version", value=3, names=("w0", "w1")):
        await train(config)
    assert [each.version for each in service.service.republished] == [1, 3]


def test_arguments_and_limits() -> None:
    config, as_json = parse_arguments(["--lr", "0.5", "--groups", "3", "--json"])
    assert (config.learner.learning_rate, config.groups, as_json) == (0.5, 3, True)
    for changes in ({"learning_rate": 0.0}, {"weight_decay": -1.0}, {"grad_norm_max": math.nan}):
        with refused(InvalidValue, names=data_words(next(iter(changes)))):
            LearnerConfig(**changes)
    with refused(InvalidValue, field="threads", value=0):
        GrpoConfig("127.0.0.1:1", "t", threads=0)


def test_a_token_comes_from_the_environment_or_a_private_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DORA_TOKEN", "of-the-environment")
    assert parse_arguments([])[0].token == "of-the-environment"
    file = tmp_path / "token"
    file.write_text("of-the-file\n")
    file.chmod(0o600)
    assert parse_arguments(["--token-file", str(file)])[0].token == file, "which is read again when it is replaced"
    for mode in (0o640, 0o604, 0o644, 0o660, 0o666):
        file.chmod(mode)
        assert main(["--token-file", str(file)]) == 1
        said = capsys.readouterr().err
        assert said.startswith("error: --token-file") and f"{mode:04o}" in said and "of-the-file" not in said
    assert main(["--token-file", str(tmp_path / "none")]) == 1
    for given in (["--token", "a-secret"], ["--token=a-secret"]):
        with pytest.raises(SystemExit):
            parse_arguments(given)
        said = capsys.readouterr().err
        assert "--token-file" in said and "a-secret" not in said


def test_bfloat16_is_used_by_itself_only_where_the_processor_multiplies_it() -> None:
    chosen = {how: parse_arguments(["--autocast", how])[0].learner.autocast for how in ("off", "on", "auto")}
    assert chosen == {"off": False, "on": True, "auto": multiplies_bfloat16()}
    assert not parse_arguments([])[0].learner.autocast
    assert multiplies_bfloat16("AVX512") and multiplies_bfloat16("AVX512_BF16")
    assert not multiplies_bfloat16("AVX2")  # emulated: a training step took over five minutes
    assert not multiplies_bfloat16("DEFAULT")


def test_the_command_fails_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--address", "nowhere"]) == 1
    assert capsys.readouterr().err.startswith("error: address = 'nowhere'")


def test_groups_of_the_fake_service_share_one_prompt() -> None:
    group = make_group(0, 0)
    assert isinstance(group.trajectories[0], Trajectory) and group.prompt_token_ids.tolist() == [1, 2]
