"""Objectives and advantages against numbers worked by hand, the papers' equations, and numerical gradients."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dora.data.advantages import (
    ESTIMATORS,
    centred,
    leave_one_out,
    normalized,
    over_sessions,
    soft_overlong_punishment,
)
from dora.data.trajectory import TrajectoryGroup
from dora.errors import Conflict, InvalidValue
from dora.trainers.objectives.batch import Row, TokenBatch
from dora.trainers.objectives.correction import correction_weights, kl_terms
from dora.trainers.objectives.presets import DEFAULT, OBJECTIVES, add_objective, objective, objective_of
from tests.contract.trainer_service import make_trajectory
from tests.refusals import refused

F64 = torch.float64


def batch_of(
    logprobs: torch.Tensor, behaviour: Sequence[float] | torch.Tensor, advantages: Sequence[float],
    lengths: Sequence[int], mask: Sequence[bool] = (), **others: torch.Tensor,
) -> TokenBatch:  # fmt: skip
    return TokenBatch(
        logprobs,
        torch.as_tensor(behaviour, dtype=F64),
        torch.tensor(mask or [True] * len(logprobs)),
        torch.tensor(advantages, dtype=F64),
        torch.tensor(lengths),
        **others,
    )


def of_ratios(
    ratios: Sequence[float], advantages: Sequence[float], lengths: Sequence[int], **others: Any
) -> tuple[torch.Tensor, TokenBatch]:
    """Logprobs with a gradient, whose ratios to a behaviour policy of logprob -2 are given."""
    logprobs = (torch.tensor(ratios, dtype=F64).log() - 2.0).requires_grad_()
    return logprobs, batch_of(logprobs, [-2.0] * len(ratios), advantages, lengths, **others)


def loss_of(name: str, batch: TokenBatch, **settings: Any) -> torch.Tensor:
    """Returns the loss of a step that is this one batch."""
    chosen = objective(name, **settings)
    total, units = chosen.sum(batch, chosen.terms(batch))
    return total / units


def random_batch(rows: int = 4, seed: int = 0, **others: Any) -> tuple[torch.Tensor, TokenBatch]:
    generator = torch.Generator().manual_seed(seed)
    lengths = [2 + (3 * row) % 5 for row in range(rows)]
    behaviour = -torch.rand(sum(lengths), generator=generator, dtype=F64) - 0.2
    drift = 0.3 * torch.randn(sum(lengths), generator=generator, dtype=F64)
    advantages = torch.randn(rows, generator=generator, dtype=F64).tolist()
    mask = (torch.rand(sum(lengths), generator=generator) > 0.2).tolist()
    logprobs = (behaviour + drift).requires_grad_()
    others = {name: behaviour + scale * drift.flip(0) for name, scale in others.items()}
    return logprobs, batch_of(logprobs, behaviour, advantages, lengths, mask, **others)


# Two responses of 2 and 3 tokens with advantages 2 and -1. Ratios: 1.5 is clipped for a gain, 0.5 for a loss.
RATIOS, ADVANTAGES, LENGTHS = (1.5, 0.5, 1.5, 0.5, 0.9), (2.0, -1.0), (2, 3)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # token terms, min of free and clipped: 2 * 1.28, 2 * 0.5; -1.5, -0.8, -0.9
        ("dapo", -(2.56 + 1.0 - 1.5 - 0.8 - 0.9) / 5),
        # clipped at 1.2: means of the responses are (2.4 + 1.0) / 2 and (-1.5 - 0.8 - 0.9) / 3
        ("grpo", -(1.7 - 3.2 / 3) / 2),
        ("dr-grpo", -(3.4 - 3.2) / 2),
        # s_1 = sqrt(0.75), s_2 = (1.5 * 0.5 * 0.9)^(1/3) = 0.675^(1/3), below the lower bound, so A < 0 is clipped
        ("gspo", -(2 * 0.75**0.5 - (1 - 3e-4)) / 2),
    ],
)
def test_clipped_objectives_by_hand(name: str, expected: float) -> None:
    _, batch = of_ratios(RATIOS, ADVANTAGES, LENGTHS)
    assert loss_of(name, batch).item() == pytest.approx(expected, rel=1e-9)


def test_where_clipping_takes_the_gradient() -> None:
    logprobs, batch = of_ratios(RATIOS, ADVANTAGES, LENGTHS)
    terms = objective("dapo").terms(batch)
    assert terms.clipped.tolist() == [True, False, False, True, False]
    assert terms.ratios.tolist() == pytest.approx(RATIOS) and terms.weights.tolist() == [1.0] * 5
    terms.losses.sum().backward()  # d/dlogp of -A r is -A r
    assert logprobs.grad.tolist() == pytest.approx([0.0, -1.0, 1.5, 0.0, 0.9])


def test_cispo_by_hand() -> None:
    logprobs, batch = of_ratios((8.0, 0.5, 1.0), (2.0, -1.0), (2, 1))
    loss = loss_of("cispo", batch)  # weights: 8 is bounded by 5; there is no lower bound
    logs = [math.log(8) - 2, math.log(0.5) - 2, -2.0]
    assert loss.item() == pytest.approx(-(5 * 2 * logs[0] + 0.5 * 2 * logs[1] - 1 * logs[2]) / 3)
    loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([-10 / 3, -1 / 3, 1 / 3])
    assert objective("cispo").terms(batch).clipped.tolist() == [True, False, False]


def test_rloo_by_hand() -> None:
    logprobs, batch = of_ratios((3.0, 0.5, 1.0), (2.0, -1.0), (2, 1))
    loss = loss_of("rloo", batch)  # weights min(3, 2), 0.5, 1; a mean over the two responses of sums
    loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([-2 * 2 / 2, -0.5 * 2 / 2, 1 / 2])
    _, batch = of_ratios((1.0, 1.0, 1.0), (2.0, -1.0), (2, 1))
    assert loss_of("rloo", batch).item() == pytest.approx(-(2 * -4.0 + -1 * -2.0) / 2)  # A log pi(y), summed


def test_decoupled_ppo_by_hand() -> None:
    # pi / prox is 1.5 and 1.1, prox / mu is 3 and 0.5: the clip is about the first, the weight is the second
    proximal = torch.tensor([3.0, 0.5], dtype=F64).log() - 2.0
    logprobs = (proximal + torch.tensor([1.5, 1.1], dtype=F64).log()).requires_grad_()
    batch = batch_of(logprobs, [-2.0, -2.0], [1.0], [2], proximal=proximal)
    loss = loss_of("decoupled-ppo", batch)
    assert loss.item() == pytest.approx(-(3 * 1.2 + 0.5 * 1.1) / 2)
    loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([0.0, -0.5 * 1.1 / 2])
    # With one optimiser step a step, the proximal policy is the trained one: nothing is clipped, every token weighed.
    terms = objective("decoupled-ppo").terms(replace(batch, proximal=None))
    assert terms.ratios.tolist() == [1.0, 1.0] and terms.weights.tolist() == pytest.approx([4.5, 0.55])


@pytest.mark.parametrize(
    ("name", "level", "expected"),
    [
        ("none", "token", [1, 1, 1, 1]),
        ("full", "token", [4, 0.5, 0.25, 1]),
        ("truncate", "token", [2, 0.5, 0.25, 1]),
        ("mask", "token", [0, 0.5, 0, 1]),  # outside of 0.3 .. 2
        ("full", "sequence", [2, 2, 0.25, 0.25]),
        ("mask", "sequence", [2, 2, 0, 0]),
        ("full", "geometric", [2**0.5, 2**0.5, 0.5, 0.5]),
        ("mask", "geometric", [2**0.5, 2**0.5, 0.5, 0.5]),
    ],
)
def test_corrections_by_hand(name: Any, level: Any, expected: list[float]) -> None:
    _, batch = of_ratios((4.0, 0.5, 0.25, 1.0), (1.0, 1.0), (2, 2))
    weights = correction_weights(batch, batch.logprobs, name, level, 0.3, 2.0)
    assert weights.tolist() == pytest.approx(expected) and not weights.requires_grad


def test_a_correction_weighs_the_gradient_and_a_masked_token_stays_in_the_mean() -> None:
    logprobs, batch = of_ratios((4.0, 0.5, 1.0), (1.0,), (3,))
    loss_of("dapo", batch, anchor="proximal", correction="mask").backward()
    assert logprobs.grad.tolist() == pytest.approx([0.0, -0.5 / 3, -1 / 3])


def test_the_kl_term_by_hand() -> None:
    logprobs, batch = of_ratios((1.0, 1.0), (0.0,), (2,))
    reference = batch.logprobs.detach() + torch.tensor([2.0, 0.5], dtype=F64).log()
    expected = [2 - math.log(2) - 1, 0.5 + math.log(2) - 1]
    assert kl_terms(batch, reference).tolist() == pytest.approx(expected)
    loss = loss_of("dapo", replace(batch, reference=reference), kl_coefficient=0.1)
    assert loss.item() == pytest.approx(0.1 * sum(expected) / 2)
    loss.backward()  # d/dlogp of e^d - d - 1 is 1 - e^d
    assert logprobs.grad.tolist() == pytest.approx([0.1 * (1 - 2) / 2, 0.1 * (1 - 0.5) / 2])
    with refused(Conflict, field="batch.reference"):
        loss_of("dapo", batch, kl_coefficient=0.1)


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr-grpo", "gspo", "decoupled-ppo"])
def test_gradients_agree_with_finite_differences(name: str) -> None:
    """Stopped gradients of the equations are constants here: the proximal policy is given, as in a second update."""
    logprobs, batch = random_batch(proximal=0.5, reference=1.5)
    settings = {"eps_low": 0.1, "eps_high": 0.15, "kl_coefficient": 0.3}

    def loss(values: torch.Tensor) -> torch.Tensor:
        return loss_of(name, replace(batch, logprobs=values), **settings)

    assert objective(name, **settings).terms(batch).clipped.any() or name == "gspo"
    assert torch.autograd.gradcheck(loss, (logprobs,))


@pytest.mark.parametrize("name", ["cispo", "rloo", "truncated"])
def test_gradients_with_stopped_weights_agree_with_finite_differences(name: str) -> None:
    """The papers' sum of weight * A * log pi, with the weights held where they are."""
    logprobs, batch = random_batch()
    loss_of(name, batch, eps_high=0.2, correction_high=1.1).backward()
    ratio = (batch.logprobs - batch.behaviour).detach().exp()
    weights = ratio.clamp(max=1.2) if name == "cispo" else ratio.clamp(max=1.1)
    units = 4 if name == "rloo" else batch.mask.sum()

    def loss(values: torch.Tensor) -> torch.Tensor:
        return -(weights * batch.spread(batch.advantages) * values)[batch.mask].sum() / units

    assert torch.autograd.gradcheck(loss, (logprobs,))
    (expected,) = torch.autograd.grad(loss(logprobs), logprobs)
    assert torch.allclose(logprobs.grad, expected)


def test_the_gradient_of_gspo_is_the_papers() -> None:
    """Section 4.2, equation 10: s_i A_i times the mean of the gradients of log pi over the response."""
    logprobs, batch = of_ratios((1.1, 0.9, 1.2), (2.0, -1.0), (2, 1))
    loss_of("gspo", batch, eps_low=0.5, eps_high=0.5).backward()
    s1 = (1.1 * 0.9) ** 0.5
    assert logprobs.grad.tolist() == pytest.approx([-s1 * 2 / 2 / 2, -s1 * 2 / 2 / 2, 1.2 / 2])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_tokens_outside_the_mask_count_for_nothing(name: str) -> None:
    logprobs, batch = of_ratios((1.1, 5.0, 0.9), (2.0, -1.0), (2, 1), mask=[True, False, True])
    behaviour = batch.behaviour.clone()
    behaviour[1] = math.nan
    loss = loss_of(name, replace(batch, behaviour=behaviour))
    loss.backward()
    alone, only = of_ratios((1.1, 0.9), (2.0, -1.0), (1, 1))
    expected = loss_of(name, only)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item())
    assert logprobs.grad.tolist() == pytest.approx([alone.grad[0].item(), 0.0, alone.grad[1].item()])


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("correction", ["none", "full", "truncate", "mask"])
def test_a_number_that_is_none_is_never_lost(name: str, correction: Any) -> None:
    """Whichever policy's logprob of a trained token is NaN, the loss is: the step can be refused."""
    settings = {"anchor": "proximal", "correction": correction, "kl_coefficient": 0.1}
    _, batch = of_ratios((1.1, 1.0, 0.9), (2.0, -1.0), (2, 1), reference=torch.full((3,), -2.0, dtype=F64))
    bad = torch.tensor([-2.0, math.nan, -2.0], dtype=F64)
    changes: list[dict[str, torch.Tensor]] = [{"logprobs": bad}, {"reference": bad}]
    changes += [{"behaviour": bad}] if correction != "none" else []
    for change in changes:
        assert loss_of(name, replace(batch, **change), **settings).isnan()


@pytest.mark.parametrize("mean", ["token", "sequence", "sequence-sum"])
def test_a_step_is_the_same_however_it_is_cut(mean: str) -> None:
    """Sums and units of the rows, one by one or together: nothing has to be known of what is still to come."""
    chosen = objective("dapo", mean=mean)
    logprobs, whole = random_batch(rows=6)
    total, units = chosen.sum(whole, chosen.terms(whole))
    (expected,) = torch.autograd.grad(total / units, logprobs)
    lengths = whole.lengths.tolist()
    of_tokens = [values.split(lengths) for values in (logprobs, whole.behaviour, whole.mask)]
    parts = list(zip(*of_tokens, whole.advantages, whole.lengths, strict=True))
    sums, all_units = torch.zeros((), dtype=F64), 0.0
    for part in parts:
        row = TokenBatch(*part[:3], part[3][None], part[4][None])
        term, its_units = chosen.sum(row, chosen.terms(row))
        sums, all_units = sums + term, all_units + its_units
    (found,) = torch.autograd.grad(sums / all_units, logprobs)
    assert (sums / all_units).item() == pytest.approx((total / units).item()) and torch.allclose(found, expected)


def group_of(rewards: Sequence[float], **fields: Sequence[Any]) -> TrajectoryGroup:
    members = []
    for index, reward in enumerate(rewards):
        own = {name: values[index] for name, values in fields.items()}
        own |= {"reward": reward, "reward_valid": math.isfinite(reward), "group_size": len(rewards)}
        length = own.get("length_tokens", 2)
        own |= {"response_token_ids": [5] * length, "logprobs": [-1.0] * length, "length_tokens": length}
        members.append(make_trajectory(0, 0, index, **({"loss_mask": [1] * length} | own), worker_history=()))
    return TrajectoryGroup("s0-g0", tuple(members))


def advantages_of(rows: Sequence[Row]) -> dict[int, float]:
    return {row.trajectory.sample_index: round(row.advantage, 6) for row in rows}


def test_rows_are_what_can_be_trained_on() -> None:
    chosen = objective("dr-grpo")
    assert advantages_of(chosen.rows(group_of([1.0, 0.0, math.nan]))) == {0: 0.5, 1: -0.5}
    assert chosen.rows(group_of([0.5, 0.5])) == [] == chosen.rows(group_of([1.0, math.nan]))
    masked = group_of([1.0, 0.0], loss_mask=[[1, 1], [0, 0]])
    assert advantages_of(chosen.rows(masked)) == {0: 0.5}, "what has no sampled token has no gradient"


def test_overlong_responses() -> None:
    group = group_of([1.0, 0.0, 0.5], finish_reason=["stop", "length", "stop"])
    assert advantages_of(objective("dr-grpo").rows(group)) == {0: 0.5, 1: -0.5, 2: 0.0}
    assert advantages_of(objective("dr-grpo", overlong="mask").rows(group)) == {0: 0.5, 2: 0.0}

    limit = group.trajectories[0].sampling.max_tokens
    group = group_of([1.0, 1.0, 1.0], length_tokens=[limit // 2, limit - limit // 8, limit])
    assert objective("dapo").rows(group) == []
    punished = objective("dr-grpo", overlong="punish", overlong_buffer=0.25, overlong_penalty=2.0).rows(group)
    assert advantages_of(punished) == {0: 1.0, 1: 0.0, 2: -1.0}  # rewards 1, 0, -1


def test_the_soft_punishment_by_hand() -> None:
    lengths, limits = np.array([80, 81, 90, 100, 130]), np.full(5, 100)
    assert soft_overlong_punishment(lengths, limits, 0.2).tolist() == pytest.approx([0.0, -0.05, -0.5, -1.0, -1.0])
    with refused(InvalidValue, field="buffer", value=0.0):
        soft_overlong_punishment(lengths, limits, 0.0)


def test_leave_one_out_by_hand() -> None:
    """Each reward less the mean of the other valid ones."""
    rewards, valid = np.array([1.0, 0.0, 0.5, 9.0]), np.array([True, True, True, False])
    assert leave_one_out(rewards, valid).tolist() == pytest.approx([0.75, -0.75, 0.0, 0.0])
    for estimate in ESTIMATORS.values():
        assert estimate(rewards, np.zeros(4, bool)).tolist() == [0.0] * 4
        assert estimate(rewards[:2], valid[:2]).sum() == 0.0 and estimate(rewards, valid).dtype == np.float32


def test_a_batch_is_what_the_record_says_of_its_rows() -> None:
    group = group_of([1.0, 0.0], length_tokens=[2, 3], loss_mask=[[1, 0], [1, 1, 1]])
    rows = objective("dr-grpo").rows(group)
    batch = TokenBatch.of(rows, torch.zeros(5))
    assert batch.behaviour.tolist() == [-1.0] * 5 and batch.mask.tolist() == [True, False, True, True, True]
    assert (batch.rows.tolist(), batch.counts.tolist()) == ([0, 0, 1, 1, 1], [1.0, 3.0])
    assert batch.spread(batch.advantages).tolist() == [0.5, 0.5, -0.5, -0.5, -0.5]


def test_objectives_are_chosen_by_name_and_settings() -> None:
    parser = argparse.ArgumentParser()
    add_objective(parser)
    given = parser.parse_args(["--objective", "gspo", "--anchor", "proximal", "--correction", "mask", "--eps-low", "1"])
    assert objective_of(given) == objective("gspo", anchor="proximal", correction="mask", eps_low=1.0)
    assert objective_of(parser.parse_args([])) == OBJECTIVES[DEFAULT]


@pytest.mark.parametrize(
    ("settings", "kind", "field", "value"),
    [
        ({"eps_low": 0.0}, InvalidValue, "eps_low", 0.0),
        ({"eps_high": math.inf}, InvalidValue, "eps_high", math.inf),
        ({"kl_coefficient": -1.0}, InvalidValue, "kl_coefficient", -1.0),
        ({"kl_coefficient": math.nan}, InvalidValue, "kl_coefficient", math.nan),
        ({"correction_high": 0.5}, InvalidValue, "correction_high", 0.5),
        ({"correction": "mask"}, Conflict, "correction", "mask"),
        ({"mean": "median"}, InvalidValue, "mean", "median"),
        ({"eps_hihg": 0.1}, InvalidValue, "objective: setting", "eps_hihg"),
    ],
)
def test_settings_that_make_no_objective_are_refused(
    settings: dict[str, Any], kind: type[InvalidValue], field: str, value: object
) -> None:
    with refused(kind, field=field, value=value):
        objective("dapo", **settings)
    with refused(InvalidValue, field="objective", value="grop"):
        objective("grop")


def test_a_session_with_branches_counts_once_in_its_group() -> None:
    rewards, valid = np.array([1.0, 0.0, 0.0, 0.0, 0.5]), np.ones(5, bool)
    found = over_sessions(centred, rewards, valid, np.array([0, 1, 1, 1, 2]))
    assert found.tolist() == [0.5, -0.5, -0.5, -0.5, 0.0]
    alone = over_sessions(normalized, rewards, valid, np.arange(5))
    assert (alone == normalized(rewards, valid)).all()
    broken = over_sessions(centred, rewards, np.array([1, 0, 0, 0, 1], bool), np.array([0, 1, 1, 1, 2]))
    assert broken.tolist() == [0.25, 0.0, 0.0, 0.0, -0.25]
