"""Micro-batches: how rows are divided, that a pack is each row alone, and that a step is one batch however it came."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dora.data.trajectory import Trajectory, TrajectoryGroup
from dora.errors import Conflict
from dora.models.tiny import TinyKind, make_tiny
from dora.trainers.batches import fitting, karmarkar_karp, packed_batches, packed_tokens
from dora.trainers.learner import Learner, LearnerConfig
from dora.trainers.objectives.batch import Row
from dora.trainers.objectives.presets import OBJECTIVES, objective
from dora.trainers.packing import Pack, packed_logprobs, packs, prepare
from dora.trainers.padding import padded_logprobs
from tests.contract.trainer_service import make_trajectory
from tests.refusals import refused
from tests.sweeps import some_of


def group(index: int, prompt: Sequence[int], lengths: Sequence[int], seed: int = 0) -> TrajectoryGroup:
    """Responses of random tokens, every other one rewarded; one token of the longest is masked out."""
    chosen = np.random.default_rng((seed, index))
    members = []
    for sample, length in enumerate(lengths):
        mask = np.ones(length, np.uint8)
        mask[0] = length < max(lengths) or length == 1
        members.append(
            make_trajectory(
                0,
                index,
                sample,
                group_size=len(lengths),
                prompt_token_ids=list(prompt),
                response_token_ids=chosen.integers(5, 20, length),
                logprobs=-chosen.random(length),
                loss_mask=mask,
                length_tokens=length,
                worker_history=(),
                reward=float(sample % 2),
                reward_valid=True,
            )
        )
    return TrajectoryGroup(members[0].group_id, tuple(members))


GROUPS = [
    group(0, [1, 5, 6], [3, 9, 1, 4]),
    group(1, [1, 7], [12, 2, 2, 5]),
    group(2, [1, 8, 9, 5, 6, 7], [1, 1, 6, 7]),
]


def rows_of(groups: Sequence[TrajectoryGroup]) -> list[Row]:
    return [row for each in groups for row in OBJECTIVES["dapo"].rows(each)]


@pytest.mark.parametrize(
    ("costs", "parts", "sums"),
    [
        # Two sets, by hand: 8-7=1, 6-5=1, then 4-1=3, 3-1=2: a difference of 2 where 0 would be possible.
        ([8, 7, 6, 5, 4], 2, [16, 14]),
        ([10, 1, 1, 1], 2, [10, 3]),
        ([5, 5, 5, 5], 4, [5, 5, 5, 5]),
        ([3], 2, [3, 0]),
        ([], 2, [0, 0]),
    ],
)
def test_sets_have_sums_near_each_other(costs: list[int], parts: int, sums: list[int]) -> None:
    found = karmarkar_karp(costs, parts)
    assert [sum(costs[index] for index in items) for items in found] == sums
    assert sorted(index for items in found for index in items) == list(range(len(costs)))


def test_long_tailed_lengths_are_balanced_better_than_in_order_of_arrival() -> None:
    drawn = random.Random(0)
    costs = [min(int(drawn.lognormvariate(5.0, 1.0)) + 1, 2000) for _ in range(256)]
    mean = sum(costs) / 8
    found = karmarkar_karp(costs, 8)
    assert max(sum(costs[index] for index in items) for items in found) < 1.001 * mean
    assert max(sum(costs[place : place + 32]) for place in range(0, 256, 32)) > 1.1 * mean
    assert found == karmarkar_karp(costs, 8)


def test_sets_hold_at_most_so_much_and_a_larger_item_is_alone() -> None:
    costs = [30, 4, 4, 4, 9, 3]
    found = fitting(costs, 12)
    assert [0] in found and sorted(index for items in found for index in items) == list(range(6))
    assert all(sum(costs[index] for index in items) <= 12 for items in found if items != [0])
    assert fitting(costs, 0) == [[index] for index in range(6)] and fitting([], 12) == []


@pytest.mark.parametrize("tokens_max", [1, 8, 14, 24, 1000])
def test_micro_batches_hold_every_row_once_and_prompts_count_once(tokens_max: int) -> None:
    rows = rows_of(GROUPS)
    batches = packed_batches(rows, tokens_max)
    ids = [row.trajectory.trajectory_id for batch in batches for row in batch]
    assert sorted(ids) == sorted(row.trajectory.trajectory_id for row in rows)
    for batch in batches:
        pack = Pack.of([row.trajectory for row in batch], "cpu")
        assert pack.input_ids.shape[1] <= tokens_max or len(batch) == 1
    assert tokens_max < 1000 or len(batches) == 1
    assert packed_tokens(rows_of(GROUPS[:1])) == 3 + 17


def test_a_pack_says_which_token_predicts_which() -> None:
    first, second = GROUPS[0].trajectories[:2], GROUPS[1].trajectories[:1]
    pack = Pack.of([first[0], second[0], first[1]], "cpu")  # a group's rows need not come one after the other
    tokens, positions = pack.input_ids[0].tolist(), pack.position_ids[0].tolist()
    assert tokens[:3] == [1, 5, 6] and positions[:13] == [0, 1, 2, 3, 4, *range(3, 11)]
    assert tokens[13:15] == [1, 7] and positions[13:] == list(range(13))
    assert pack.predicting.tolist() == [2, 3, 4, *range(14, 26), 2, *range(5, 13)]
    expected = [*first[0].response_token_ids, *second[0].response_token_ids, *first[1].response_token_ids]
    assert pack.targets.tolist() == expected


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices are too small here for several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


UNPACKED = (
    "hybrid",
    "mamba",
    "conv",
    "chunk",
)  # kinds of which no two rows are in one sequence: they mix tokens otherwise


@pytest.fixture(params=[kind for kind in get_args(TinyKind) if kind not in UNPACKED])
def folder(request: pytest.FixtureRequest, models: Path) -> Path:
    return make_tiny(request.param, models / request.param)


@pytest.fixture
def dense(models: Path) -> Path:
    return make_tiny("dense", models / "dense")


def load(folder: Path) -> Any:
    """In float64, for which grouped products of experts have no kernel."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")


def alone(module: Any, trajectory: Trajectory) -> torch.Tensor:
    """Logprobs of one row without packing, padding or a cache."""
    row = np.concatenate([trajectory.prompt_token_ids, trajectory.response_token_ids]).astype(np.int64)
    logits = module(input_ids=torch.from_numpy(row)[None]).logits[0, :-1]
    logprobs = torch.log_softmax(logits.float(), -1).gather(-1, torch.from_numpy(row)[1:, None])[:, 0]
    return logprobs[len(trajectory.prompt_token_ids) - 1 :]


def test_a_packed_row_has_the_logprobs_and_gradients_of_the_row_alone(folder: Path) -> None:
    """Lengths beyond the sliding window too. float32 is where transformers itself computes parts of a model."""
    long = group(3, [1, *range(5, 20)] * 2, [70, 40, 1, 66])
    trajectories = [each for chosen in [*GROUPS, long] for each in chosen.trajectories]
    unpacked, module = load(folder), load(folder)
    expected = torch.cat([alone(unpacked, each) for each in trajectories])
    weights = torch.linspace(-1.0, 1.0, len(expected))
    (expected * weights).sum().backward()
    assert packs(module)
    prepare(module)
    found = packed_logprobs(module, trajectories)
    (found * weights).sum().backward()
    assert torch.allclose(found, expected, atol=2e-5), float((found - expected).abs().max())
    for (name, one), other in zip(unpacked.named_parameters(), module.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            assert torch.allclose(one.grad, other.grad, rtol=1e-4, atol=1e-4 * float(one.grad.abs().max())), name


def test_a_module_that_takes_packs_takes_padded_rows_as_before(folder: Path) -> None:
    module, as_loaded = load(folder), load(folder)
    prepare(module)
    members = GROUPS[0].trajectories
    assert torch.equal(padded_logprobs(module, members), padded_logprobs(as_loaded, members))
    assert torch.equal(alone(module, members[1]), alone(as_loaded, members[1]))


@pytest.mark.parametrize("kind", UNPACKED)
def test_rows_of_a_model_with_a_state_are_padded_and_each_reads_its_prompt(kind: TinyKind, tmp_path: Path) -> None:
    module, members = load(make_tiny(kind, tmp_path / kind)), GROUPS[0].trajectories
    assert not packs(module)
    found = padded_logprobs(module, members)
    assert torch.allclose(found, torch.cat([alone(module, each) for each in members]), atol=2e-5)


@pytest.mark.parametrize("name", some_of(("dapo", "gspo", "rloo"), "gspo"))
def test_a_step_is_one_batch_however_its_groups_come_and_are_cut(name: str, dense: Path) -> None:
    """Means over tokens, responses and sums of responses; equality but for rounding, which logprobs have in float32."""
    chosen = objective(name, kl_coefficient=0.1)

    def gradients(tokens_max: int, packing: bool, at_once: int, groups: Sequence[TrajectoryGroup]) -> Any:
        module = load(dense)
        config = LearnerConfig(objective=chosen, micro_batch_tokens=tokens_max, packing=packing)
        learner = Learner(module, config, reference=load(dense))
        for index, each in enumerate(groups):
            learner.add_group(each)
            if index % at_once == at_once - 1:
                learner.work()
        learner.work()
        sums = learner._sums
        return [parameter.grad.clone() for parameter in module.parameters()], sums.loss, sums.units

    whole, loss, units = gradients(1000, True, 3, GROUPS)
    for tokens_max, packing, at_once in ((1000, True, 1), (12, True, 1), (1, True, 2), (1000, False, 3)):
        found, other_loss, other_units = gradients(tokens_max, packing, at_once, GROUPS[::-1])
        assert other_units == units and other_loss == pytest.approx(loss, rel=1e-5)
        for one, other in zip(whole, found, strict=True):
            assert torch.allclose(one, other, rtol=1e-5, atol=1e-6 * float(one.abs().max()))


def test_models_that_carry_more_than_attention_along_a_row_are_not_packed(dense: Path) -> None:
    module = load(dense)
    assert packs(module)
    config = SimpleNamespace(_attn_implementation="sdpa")
    like = {"config": config, "_supports_attention_backend": True, "_is_stateful": False}
    assert packs(SimpleNamespace(**like))
    assert not packs(SimpleNamespace(**like | {"_is_stateful": True}))
    for changed in ({"_attn_implementation": "eager"}, {"layer_types": ["conv"]}, {"attention_chunk_size": 8}):
        other = SimpleNamespace(**{"_attn_implementation": "sdpa"} | changed)
        assert not packs(SimpleNamespace(**like | {"config": other}))
    assert not packs(torch.nn.Linear(1, 1))


def test_a_model_that_loses_the_pack_on_the_way_is_refused(dense: Path) -> None:
    module = load(dense)
    prepare(module)
    forward = module.model.forward
    module.model.forward = lambda *given, **named: forward(*given, **{k: v for k, v in named.items() if k != "pack"})
    with refused(Conflict, field="model", value="Qwen3Attention"):
        packed_logprobs(module, GROUPS[0].trajectories)


def test_work_takes_what_has_come_and_counts_it_once(dense: Path) -> None:
    learner = Learner(load(dense), LearnerConfig())
    learner.work()
    for each in GROUPS:
        learner.add_group(each)
        learner.work()
    learner.add_group(replace(GROUPS[0], trajectories=GROUPS[0].trajectories[::2]))  # equal rewards
    metrics = learner.finish_step()
    assert (metrics.groups, metrics.groups_trained) == (4, 3)
    assert metrics.signals.tokens_trained == sum(int(each.loss_mask().sum()) for each in GROUPS)
    assert math.isfinite(metrics.grad_norm) and learner.busy_s > 0.0
    assert learner.finish_step().groups == 0
