"""A step's signals against hand-worked numbers, however it is cut; alarms, and where else signals go."""

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dora.data.mismatch import Mismatch, by_version, least_kl, mismatches
from dora.errors import DoraError, InvalidValue
from dora.orchestrator.services.trainer import METRICS_MAX, checked_metrics
from dora.trainers.grpo import main
from dora.trainers.learner import LearnerConfig, StepMetrics
from dora.trainers.objectives.batch import TokenBatch
from dora.trainers.options import parse_arguments
from dora.trainers.report import StepReport, alarm_lines, step_line
from dora.trainers.signals import (
    LOG_RATIO_BIN,
    STALENESS_MAX,
    ByStaleness,
    added,
    alarm,
    numbers_by_staleness,
    response_sums,
    token_sums,
    whole,
)
from dora.trainers.writers import make_writers
from tests.contract.trainer_service import make_trajectory
from tests.refusals import refused

NAN = math.nan


def batch(
    ratios: Sequence[Sequence[float]], mask: Sequence[int], behaviour: float = -1.0, clip_above: float = 1.9
) -> tuple[TokenBatch, torch.Tensor]:
    """Rows of tokens with these importance ratios, and which of them are clipped."""
    flat = torch.tensor([ratio for row in ratios for ratio in row], dtype=torch.float64)
    lengths = torch.tensor([len(row) for row in ratios])
    held = torch.tensor(mask, dtype=torch.bool)
    tokens = TokenBatch(
        flat.log() + behaviour, torch.full_like(flat, behaviour), held, torch.ones(len(ratios)).double(), lengths
    )
    return tokens, held & (flat > clip_above)


def test_a_mismatch_that_is_no_number_or_of_an_unknown_version_is_left_out() -> None:
    told = {"staleness_0/mismatch_kl": NAN, "staleness_1/mismatch_kl": 0.5, "staleness_1/ratio_outside": -1.0}
    told |= {"staleness_2/mismatch_kl": 0.2, "staleness_5+/mismatch_kl": 1.0, "mismatch_kl": 1.0}
    assert mismatches(9, told) == [Mismatch(7, 2, 0.2, 0.0, 0)]
    assert mismatches(1, told) == [], "no version is below 0"
    first, second = Mismatch(7, 0, 0.1, 0.0, 5), Mismatch(8, 1, 0.4, 0.0, 5)
    assert by_version([*mismatches(9, told), first, second]) == [second, first], "of the lowest staleness"


def test_what_training_has_changed_is_not_taken_for_the_engines_fault() -> None:
    told = {"staleness_2/mismatch_kl": 0.16, "staleness_3/mismatch_kl": 9.0}
    assert least_kl(9, told, {7: 0.01, 8: 0.04}) == pytest.approx((0.4 - 0.1 - 0.2) ** 2)
    assert least_kl(9, told, {7: 0.09, 8: 0.04}) == 0.0
    assert least_kl(9, told, {8: 0.0}) == 0.0, "the movement of step 7 is not known"
    assert least_kl(9, told | {"staleness_0/mismatch_kl": 0.3}, {}) == pytest.approx(0.3)
    assert least_kl(9, {}, {}) == -1.0


def test_the_signals_of_two_rows_by_hand() -> None:
    """Ratios 1, 1 and a masked 5 of staleness 0; 2 and 0.5 of staleness 1. Sampled at a logprob of -1."""
    tokens, clipped = batch([[1.0, 1.0, 5.0], [2.0, 0.5]], [1, 1, 0, 1, 1])
    sums = token_sums(tokens, clipped, [0, 1])
    fresh, stale, step = sums[0].signals(), sums[1].signals(), whole(sums)
    assert (fresh.tokens_trained, stale.tokens_trained, step.tokens_trained) == (2, 2, 4)
    assert (fresh.clip_fraction, stale.clip_fraction, step.clip_fraction) == (0.0, 0.5, 0.25)
    assert (fresh.ratio_max, step.ratio_max) == pytest.approx((1.0, 2.0))
    assert fresh.effective_sample == pytest.approx(1.0)
    assert stale.effective_sample == pytest.approx(2.5**2 / (2 * 4.25))
    assert (fresh.mismatch_kl, stale.mismatch_kl, step.mismatch_kl) == pytest.approx((0.0, 0.25, 0.125))
    assert (fresh.ratio_outside, stale.ratio_outside, step.ratio_outside) == (0.0, 1.0, 0.5)
    (newest, older) = mismatches(7, numbers_by_staleness(sums))
    assert newest == Mismatch(7, 0, 0.0, 0.0, 2)
    assert (older.version, older.staleness, older.tokens) == (6, 1, 2) and older.kl == pytest.approx(0.25)
    assert step.effective_sample == pytest.approx(4.5**2 / (4 * 6.25))
    assert (fresh.logprob_gap, stale.logprob_gap) == pytest.approx((0.0, math.log(2)))
    assert (step.logprob_gap, step.logprob_gap_max) == pytest.approx((math.log(2) / 2, math.log(2)))
    assert step.entropy == pytest.approx(1.0)  # log 2 and log 1/2 make up for each other


def test_the_signals_of_responses_by_hand() -> None:
    finished = {"worker_history": (), "finished_at": 100.0}
    responses = [
        make_trajectory(3, 0, 0, staleness=0, reward=1.0, **finished),  # 3 tokens
        make_trajectory(3, 0, 1, staleness=2, reward=0.5, **finished),  # 4 tokens
        make_trajectory(3, 0, 2, staleness=2, reward=NAN, reward_valid=True, **finished),  # 5, and no reward
        make_trajectory(3, 0, 3, staleness=2, reward=9.0, reward_valid=False, **finished),  # 6, one not to be used
    ]
    responses[3] = replace(responses[3], finished_at=106.0)  # by a clock that is ahead
    sums = response_sums(responses, taken_at=104.0)
    fresh, stale, step = sums[0].signals(), sums[2].signals(), whole(sums)
    assert (fresh.trajectories, stale.trajectories, step.trajectories) == (1, 3, 4)
    assert (fresh.reward_mean, stale.reward_mean, step.reward_mean) == (1.0, 0.5, 0.75)
    assert (fresh.length_mean, stale.length_mean, step.length_mean) == (3.0, 5.0, 4.5)
    assert (fresh.queued_s, stale.queued_s, step.queued_s) == pytest.approx((4.0, 8 / 3, 3.0))
    assert math.isnan(step.clip_fraction) and "clip_fraction" not in step.numbers()


def test_quantiles_are_nearest_ranks_within_half_a_bin() -> None:
    """The 1st, 50th and 99th of 1.00, 1.01 ... 1.99; no more than 1 in 100 exceeds the last."""
    ratios = [1.0 + number / 100 for number in range(100)]
    tokens, clipped = batch([ratios[::-1]], [1] * 100)
    found = whole(token_sums(tokens, clipped, [0]))
    half = math.exp(LOG_RATIO_BIN / 2) - 1
    assert (found.ratio_p01, found.ratio_p50, found.ratio_p99) == pytest.approx((1.0, 1.49, 1.98), rel=half)
    assert found.ratio_p01 == 1.0  # as fresh weights have it, and not a bin's edge


def test_signals_are_the_same_however_a_step_is_cut() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [(0.3 * torch.randn(7, generator=generator)).exp().tolist() for _ in range(12)]
    staleness = [number % 3 for number in range(12)]
    together = token_sums(*batch(rows, [1] * 84), staleness)
    for cut in (1, 5):
        parts: ByStaleness = {}
        for first in reversed(range(0, 12, cut)):
            some = rows[first : first + cut]
            parts = added(parts, token_sums(*batch(some, [1] * 7 * len(some)), staleness[first : first + cut]))
        for each in (0, 1, 2):
            one, other = together[each].signals().numbers(), parts[each].signals().numbers()
            assert one == pytest.approx(other, rel=1e-12)
            assert (one["ratio_p01"], one["ratio_p99"]) == (other["ratio_p01"], other["ratio_p99"])


def test_logprobs_that_are_not_finite_are_counted_and_spoil_nothing() -> None:
    tokens, clipped = batch([[1.0, 1.0, 1.0, 2.0]], [1, 1, 1, 1])
    tokens.logprobs[0], tokens.behaviour[1] = -math.inf, NAN
    found = whole(token_sums(tokens, clipped, [0]))
    assert (found.tokens_trained, found.logprobs_invalid) == (4, 2)
    assert (found.ratio_max, found.logprob_gap) == pytest.approx((2.0, math.log(2) / 2))
    huge, clipped = batch([[math.exp(300.0), 1.0]], [1, 1])
    assert all(map(math.isfinite, whole(token_sums(huge, clipped, [0])).numbers().values()))


def metrics_of(sums: ByStaleness, bound: float = 0.2) -> StepMetrics:
    found = whole(sums)
    alarms = alarm(found.clip_fraction, bound)
    return StepMetrics(0.5, 1.0, 2, 2, 0, 1.0, found, numbers_by_staleness(sums), alarms)


def test_a_commit_has_room_for_the_signals_of_any_window() -> None:
    tokens, clipped = batch([[1.0]] * 64, [1] * 64)
    sums = added(
        token_sums(tokens, clipped, range(64)),
        response_sums([make_trajectory(0, 0, 0, staleness=staleness) for staleness in range(64)], 3.0),
    )
    assert sums[STALENESS_MAX].signals().tokens_trained == 64 - STALENESS_MAX
    numbers = metrics_of(sums, bound=-1.0).numbers()
    assert len(checked_metrics(numbers)) < METRICS_MAX
    assert {"clip_fraction", "staleness_0/clip_fraction", "staleness_5+/clip_fraction"} <= numbers.keys()


def test_an_alarm_is_given_above_its_bound_and_not_at_it() -> None:
    sums = token_sums(*batch([[1.0, 1.0], [2.0, 0.5]], [1, 1, 1, 1]), [0, 1])
    quiet, loud = metrics_of(sums, 0.25), metrics_of(sums, 0.2)
    assert quiet.alarms == {} and not any(name.startswith("alarm") for name in quiet.numbers())
    assert loud.numbers()["alarm_clip_fraction"] == 0.2
    report = StepReport(7, loud, (), 1.0, 0.25)
    assert alarm_lines(report) == ["step 7: clip_fraction 0.25 is above 0.2"]
    assert "clipped 25.0%" in step_line(report) and report.numbers()["waited_s"] == 0.25
    nothing = StepReport(8, metrics_of({}), (), 1.0, 0.0)  # a step that taught nothing
    assert alarm_lines(nothing) == [] and "clipped -" in step_line(nothing)
    for bound in (-0.1, 1.1, NAN):
        with refused(InvalidValue, field="clip_alarm"):
            LearnerConfig(clip_alarm=bound)
    assert parse_arguments(["--clip-alarm", "0.3"])[0].learner.clip_alarm == 0.3


@pytest.mark.parametrize(("package", "value"), [("tensorboard", "curves"), ("wandb", "a-project")])
def test_a_package_that_is_missing_is_named_before_the_first_step(
    package: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # what an absent one is to an import
    with refused(
        DoraError,
        names=(
            package,
            package,
            package,
        ),
    ):
        make_writers(**{"tensorboard": "", "wandb": "", package: value}, config={})  # type: ignore[arg-type]
    assert main(["--address", "127.0.0.1:1", f"--{package}", value]) == 1
    assert capsys.readouterr().err.startswith(f"error: --{package} needs {package}")
    assert make_writers("", "", {}) == []


def test_tensorboard_has_every_signal_of_a_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sums = token_sums(*batch([[1.0, 1.0], [2.0, 0.5]], [1, 1, 1, 1]), [0, 1])
    numbers: dict[str, Any] = StepReport(7, metrics_of(sums), (), 1.0, 0.25).numbers()
    (write,) = make_writers(str(tmp_path), "", {})
    write(7, numbers)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == {name.replace("+", "_") for name in numbers}
    (point,) = events.Scalars("staleness_1/clip_fraction")
    assert (point.step, point.value) == (7, 0.5)


def test_a_run_of_wandb_is_kept_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    (write,) = make_writers("", "a-project", {"learning_rate": 1e-6})
    write(7, {"loss": 0.5, "staleness_0/clip_fraction": 0.1})
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
