"""Router replay in a trainer: what the experts of a record weigh, and that each token gets its own row of it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig

from dora.data.trajectory import Trajectory, TrajectoryGroup
from dora.data.types import RoutingShape
from dora.errors import Conflict, InvalidValue
from dora.models import routing
from dora.models.tiny import make_tiny
from dora.trainers.batches import packed_batches
from dora.trainers.dealing import rows_from_bytes, rows_to_bytes
from dora.trainers.learner import Learner, LearnerConfig
from dora.trainers.objectives.batch import Row
from dora.trainers.options import parse_arguments
from dora.trainers.packing import Pack, packed_logprobs, prepare
from dora.trainers.padding import padded_batches, padded_logprobs, whole_row_logprobs
from dora.trainers.router_replay import OWN, RouterReplay, replay, rows_of, shared_prompt
from tests.refusals import refused
from tests.unit.test_batches import GROUPS, alone, load


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=["moe", "mla"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(request.param, tmp_path_factory.mktemp("models") / request.param)


def routed(trajectory: Trajectory, shape: RoutingShape, prompt_seed: int = 0) -> Trajectory:
    """With rows of random experts, which differ from token to token; of the prompt by ``prompt_seed`` alone."""
    prompt_tokens = len(trajectory.prompt_token_ids)
    parts = []
    for seed, tokens in ((prompt_seed, prompt_tokens), (trajectory.sample_index + 100, trajectory.length_tokens - 1)):
        chosen = np.random.default_rng(seed).random((tokens, shape.layers, shape.experts)).argsort(axis=-1)
        parts.append(chosen[..., : shape.top_k].astype(np.uint8))
    return replace(trajectory, routed_experts=np.concatenate(parts))


def led_alone(module: Any, trajectory: Trajectory) -> torch.Tensor:
    """One row without packing, padding or a cache."""
    routers = RouterReplay(module)
    (rows,) = rows_of([trajectory]) or [None]
    with routers.sending(None if rows is None else torch.from_numpy(rows)):
        return alone(module, trajectory)


# What chosen experts weigh.


def test_weights_are_those_of_the_trainers_own_logits_at_the_recorded_experts() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0], [3.0, 2.0, 1.0, 0.0]]).log1p().requires_grad_()  # weights 1, 2, 3, 4
    recorded, own = torch.tensor([[1, 0], [OWN, OWN]]), torch.tensor([[3, 2], [0, 1]])
    weights, indices = replay(logits, recorded, own)
    assert indices.tolist() == [[1, 0], [0, 1]]
    assert weights.tolist() == [pytest.approx([0.2, 0.1]), pytest.approx([0.4, 0.3])]
    weights, _ = replay(logits, recorded, own, renormalise=True, scale=6.0)
    assert weights.tolist() == [pytest.approx([4.0, 2.0]), pytest.approx([24 / 7, 18 / 7])]
    weights[0, 0].backward()
    assert logits.grad is not None
    # 6 * p1 / (p0 + p1): 6 * 2/3 * 1/3 up and down, and nothing of experts that were not chosen.
    assert logits.grad[0].tolist() == pytest.approx([-4 / 3, 4 / 3, 0.0, 0.0], abs=1e-6)
    assert not logits.grad[1].any()


@pytest.mark.parametrize("packing", [True, False])
def test_a_trainers_own_choices_change_nothing(folder: Path, packing: bool) -> None:
    module, forward = load(folder), packed_logprobs if packing else padded_logprobs
    if packing:
        prepare(module)
    routers = RouterReplay(module)
    for group in GROUPS:
        members = [chosen_by(module, each) for each in group.trajectories]
        without = forward(module, members)
        assert torch.allclose(forward(module, members, routers), without, atol=1e-6)
        others = [routed(each, routing(folder)) for each in members]
        assert not torch.allclose(forward(module, others, routers), without, atol=1e-2)
        assert torch.equal(forward(module, others), without), "without its routers a model is as it was"


def chosen_by(module: Any, trajectory: Trajectory) -> Trajectory:
    """With the rows that ``module`` itself chooses, as its gates say."""
    found: list[torch.Tensor] = []
    gates = [each for name, each in module.named_modules() if name.endswith("mlp.gate")]
    hooks = [gate.register_forward_hook(lambda _gate, _inputs, output: found.append(output[2])) for gate in gates]
    with torch.no_grad():
        alone(module, trajectory)
    for hook in hooks:
        hook.remove()
    return replace(trajectory, routed_experts=torch.stack(found, dim=1)[:-1].numpy().astype(np.uint8))


def test_routers_of_other_families_are_asked_how_they_weigh(folder: Path) -> None:
    """Mixtral's says nowhere that it renormalises; a dense model has none."""
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    mixtral = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    assert [each.renormalise for each in RouterReplay(mixtral)._routers] == [True, True]
    scaled = load(folder)
    for module in scaled.modules():
        if hasattr(module, "routed_scaling_factor"):
            module.routed_scaling_factor = 2.5
    expected = {"Qwen3MoeForCausalLM": (True, 1.0), "DeepseekV2ForCausalLM": (False, 2.5)}[type(scaled).__name__]
    assert {(each.renormalise, each.scale) for each in RouterReplay(scaled)._routers} == {expected}


# Which token gets which row.


@pytest.mark.parametrize("forward", [packed_logprobs, padded_logprobs, whole_row_logprobs])
def test_a_token_gets_its_own_row_wherever_it_is_in_a_batch(folder: Path, forward: Any) -> None:
    """Samples of a group, of which the last read its prompt elsewhere; one trajectory has no rows at all."""
    shape = routing(folder)
    members = [[routed(each, shape, prompt_seed=each.sample_index // 3) for each in of.trajectories] for of in GROUPS]
    members[2][1] = replace(members[2][1], routed_experts=None)
    trajectories = [each for group in members for each in group]
    reference, module = load(folder), load(folder)
    expected = torch.cat([led_alone(reference, each) for each in trajectories])
    slope = torch.linspace(-1.0, 1.0, len(expected))
    (expected * slope).sum().backward()

    rows = [Row(each, 0.0) for each in trajectories]
    packing = forward is packed_logprobs
    batches = packed_batches(rows, 60) if packing else padded_batches(rows, 60)
    assert len(batches) > 1
    if packing:
        prepare(module)
    routers = RouterReplay(module)
    places = torch.arange(len(expected)).split([each.length_tokens for each in trajectories])
    place = {each.trajectory_id: at for each, at in zip(trajectories, places, strict=True)}
    for batch in batches:
        of_batch = [row.trajectory for row in batch]
        found = forward(module, of_batch, routers)
        at = torch.cat([place[each.trajectory_id] for each in of_batch])
        assert torch.allclose(found, expected[at], atol=2e-5), float((found - expected[at]).abs().max())
        (found * slope[at]).sum().backward()
    for (name, one), other in zip(reference.named_parameters(), module.named_parameters(), strict=True):
        assert one.grad is not None and other[1].grad is not None, name
        assert torch.allclose(one.grad, other[1].grad, rtol=1e-4, atol=1e-4 * float(one.grad.abs().max())), name
        assert not name.endswith("gate.weight") or one.grad.any()


def test_rows_lie_beside_the_tokens_that_were_fed() -> None:
    """Two samples that read their prompt alike share it; a third that did not reads it again. Last tokens have none."""
    shape = RoutingShape(layers=3, top_k=2, experts=8)
    first, second, third = (routed(each, shape) for each in GROUPS[0].trajectories[:3])
    third = routed(third, shape, prompt_seed=1)
    assert shared_prompt(first) == shared_prompt(second) != shared_prompt(third)
    pack = Pack.of([first, third, second], "cpu")
    assert first.routed_experts is not None and second.routed_experts is not None and third.routed_experts is not None
    expected = [first.routed_experts, second.routed_experts[3:], third.routed_experts]
    assert pack.routed is not None and pack.routed.tolist() == np.concatenate(expected).tolist()
    assert pack.input_ids.shape[1] == len(pack.routed)
    (rows,) = rows_of([first]) or []
    assert len(rows) == 6 and (rows[-1] == OWN).all() and (rows[:-1] == first.routed_experts).all()
    assert Pack.of(GROUPS[0].trajectories, "cpu").routed is None
    mask = np.arange(first.length_tokens) < first.length_tokens - 2  # a session broken off after two environment tokens
    cut = replace(first, loss_mask=mask.astype(np.uint8), routed_experts=first.routed_experts[:-2])
    (rows,) = rows_of([cut]) or []
    assert len(rows) == 6 and (rows[3:] == OWN).all() and (rows[:3] == first.routed_experts[:3]).all()


# The reference trainer.


def step_loss(folder: Path, group: TrajectoryGroup, **options: Any) -> float:
    learner = Learner(load32(folder), LearnerConfig(**options))
    learner.add_group(group)
    metrics = learner.finish_step()
    return metrics.signals.logprob_gap


def load32(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("packing", [True, False])
def test_the_trainer_replays_what_the_record_has_and_can_be_told_not_to(folder: Path, packing: bool) -> None:
    """Recorded logprobs are those of the recorded experts: with them the gap is that of rounding."""
    members = [routed(each, routing(folder)) for each in GROUPS[0].trajectories]
    module = load32(folder)
    with torch.no_grad():
        recorded = [replace(each, logprobs=led_alone(module, each).numpy()) for each in members]
    group = TrajectoryGroup(recorded[0].group_id, tuple(recorded))
    assert step_loss(folder, group, packing=packing) < 1e-4
    assert step_loss(folder, group, packing=packing, router_replay=False) > 0.05
    assert parse_arguments([])[0].learner.router_replay
    assert not parse_arguments(["--no-router-replay"])[0].learner.router_replay
    again = rows_from_bytes(rows_to_bytes([Row(each, 0.5) for each in recorded]))
    for one, other in zip(recorded, again, strict=True):
        assert one.routed_experts is not None and other.trajectory.routed_experts is not None
        assert one.routed_experts.tobytes() == other.trajectory.routed_experts.tobytes()


def test_rows_of_another_model_are_refused_before_they_are_trained_on(folder: Path, tmp_path: Path) -> None:
    shape = routing(folder)
    learner = Learner(load32(folder), LearnerConfig())

    def group_of(other: RoutingShape) -> TrajectoryGroup:
        return TrajectoryGroup(GROUPS[0].group_id, tuple(routed(each, other) for each in GROUPS[0].trajectories))

    with refused(Conflict, field="trajectory s0-g0-0: routed_experts", value="5 layers of 2", names=(shape.top_k,)):
        learner.add_group(group_of(replace(shape, layers=5)))
    with refused(InvalidValue, field="trajectory s0-g0-0: routed_experts", value=196, names=(shape.experts - 1,)):
        learner.add_group(group_of(replace(shape, experts=200)))
    dense = load32(make_tiny("dense", tmp_path / "dense"))
    with refused(Conflict, field="trajectory s0-g0-0: routed_experts"):
        Learner(dense, LearnerConfig()).add_group(group_of(shape))
    Learner(dense, LearnerConfig(router_replay=False)).add_group(group_of(shape))


def test_rows_that_are_not_one_for_each_token_of_a_pass_are_refused(folder: Path) -> None:
    module, shape = load32(folder), routing(folder)
    routers = RouterReplay(module)
    wrong = torch.zeros(4, shape.layers, shape.top_k, dtype=torch.int32)
    with refused(InvalidValue, field="routed: rows", value=4, names=("3",)), routers.sending(wrong):
        module(input_ids=torch.tensor([[1, 2, 3]]))
    module(input_ids=torch.tensor([[1, 2, 3]]))
