"""Predictors of response lengths, and the recall they are judged by."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from dora.core.forecast import prediction
from dora.core.forecast.lognormal import longest_quantile
from dora.core.forecast.prediction import PREDICTORS, Predictor, PromptTraits, Recall, RegressionTrend
from dora.errors import InvalidValue
from dora.lab.sim.scenario import Lengths, Workload
from dora.lab.sim.workload import SimPrompt, WorkloadStream
from tests.refusals import refused


def traits(prompt: SimPrompt, *, known: bool = False) -> PromptTraits:
    return PromptTraits(
        prompt.key,
        prompt.task_id,
        prompt.prompt_tokens,
        prompt.max_tokens,
        prompt.group_size,
        prompt.features,
        prompt.lengths if known else (),
    )


def asked(
    key: str = "p", task: str = "t", features: tuple[float, ...] = (), known: tuple[int, ...] = ()
) -> PromptTraits:
    return PromptTraits(key, task, 100, 30_000, 4, features, known)


# ----------------------------------------------------------------------------------------------------------- predictors


def taught(name: str, workload: Workload, steps: int, groups: int = 256) -> tuple[Predictor, Recall, np.ndarray]:
    """The predictor, its recall of the longest groups in the last step, and there (error, log_sd) of each response."""
    stream, predictor = WorkloadStream(workload, 0, groups), PREDICTORS[name]()
    recall = Recall(groups)
    errors = np.empty(0)
    for _ in range(steps):
        prompts = stream.take(groups)
        estimates = [predictor.predict(traits(prompt, known=name == "oracle")) for prompt in prompts]
        for prompt, estimate in zip(prompts, estimates, strict=True):
            recall.add(longest_quantile(estimate, prompt.group_size, 0.5), max(prompt.lengths))
            for tokens in prompt.lengths:
                predictor.observe(traits(prompt), tokens)
        pairs = zip(prompts, estimates, strict=True)
        errors = np.array([(math.log(n) - e.log_mean, e.log_sd) for prompt, e in pairs for n in prompt.lengths])
    return predictor, recall, errors


def test_the_oracle_recalls_everything() -> None:
    assert taught("oracle", Workload(), 1)[1].longest() == 1.0


def test_the_ranker_reads_the_features_within_the_first_epoch() -> None:
    _, blind, _ = taught("statistics", Workload(), 8)
    _, seeing, errors = taught("ranker", Workload(), 8)
    assert blind.longest() < 0.35
    assert seeing.longest() > 0.5
    assert errors[:, 0].mean() == pytest.approx(0.0, abs=0.15)
    # sigma sqrt(1 - 0.6 * 0.85^2): neither worse than the features allow, nor surer than it is
    assert errors[:, 0].std() == pytest.approx(1.2 * math.sqrt(1 - 0.6 * 0.85**2), rel=0.06)
    assert (errors[:, 0] / errors[:, 1]).std() == pytest.approx(1.0, abs=0.07)


@pytest.mark.parametrize("name", ["statistics", "ranker"])
def test_the_second_epoch_knows_the_prompts(name: str) -> None:
    _, recall, errors = taught(name, Workload(prompts=1024), 8)
    assert recall.longest() > 0.6
    assert errors[:, 0].std() == pytest.approx(1.2 * math.sqrt(0.4), rel=0.08)
    assert (errors[:, 0] / errors[:, 1]).std() == pytest.approx(1.0, abs=0.07)


@pytest.mark.parametrize("name", ["statistics", "ranker"])
def test_predictors_follow_drift(name: str) -> None:
    workload = Workload(prompts=1024, lengths=Lengths(mu=6.0, cap_tokens=10**9, drift_per_step=0.1))
    _, recall, errors = taught(name, workload, 16)
    assert errors[:, 0].mean() == pytest.approx(0.0, abs=0.25)  # lengths have grown fourfold: 1.43 without forgetting
    assert recall.longest() > 0.6


@pytest.mark.parametrize("name", ["statistics", "ranker"])
def test_predictors_are_deterministic(name: str) -> None:
    one, other = (taught(name, Workload(), 2)[0] for _ in range(2))
    prompt = traits(WorkloadStream(Workload(), 3, 1).take(1)[0])
    assert one.predict(prompt) == other.predict(prompt)


@pytest.mark.parametrize("name", sorted(PREDICTORS))
def test_before_anything_is_known_responses_are_thought_long(name: str) -> None:
    estimate = PREDICTORS[name]().predict(asked())
    assert estimate.log_mean == pytest.approx(math.log(15_000))
    assert 0.5 < estimate.log_sd < 2.0 and 0.0 < estimate.group_share < 1.0


def test_statistics_shrink_from_prompt_to_task_to_all() -> None:
    predictor = PREDICTORS["statistics"]()
    rng = np.random.default_rng(0)
    for draw in range(2000):  # two tasks, of 100 and of 1,000 tokens
        for task, tokens in (("short", 100), ("long", 1000)):
            predictor.observe(asked(f"{task}{draw % 200}", task), round(tokens * math.exp(rng.normal(0, 0.3))))
    for _ in range(8):
        predictor.observe(asked("odd", "short"), 10_000)
    unseen, short, long, odd = (
        math.exp(predictor.predict(asked(key, task)).log_mean)
        for key, task in (("new", "other"), ("new", "short"), ("new", "long"), ("odd", "short"))
    )
    assert unseen == pytest.approx(math.sqrt(100 * 1000), rel=0.2)
    assert short == pytest.approx(100, rel=0.6) and long == pytest.approx(1000, rel=0.4)
    assert short < unseen < long < odd < 10_000


def test_statistics_forget_the_prompt_first_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "PROMPTS_MAX", 2)
    predictor = PREDICTORS["statistics"]()
    for key in ("first", "second", "third"):
        for tokens in (50, 5000, 5000) if key == "first" else (50, 50, 50):
            predictor.observe(asked(key), tokens)
    forgotten, unknown, kept = (predictor.predict(asked(key)) for key in ("first", "never", "third"))
    assert forgotten == unknown != kept


def test_statistics_tell_the_groups_share_from_pairs_of_siblings() -> None:
    predictor = taught("statistics", Workload(group_size=2), 16)[0]
    unseen = predictor.predict(asked("new", "synthetic"))
    assert unseen.log_sd == pytest.approx(1.2, rel=0.05)
    assert unseen.group_share == pytest.approx(0.6, abs=0.05)


def test_the_regression_follows_a_relation_that_turns_round() -> None:
    trend = RegressionTrend(horizon=512)
    for sign in (1.0, -1.0):
        for draw in range(2048):
            feature = 1.0 if draw % 2 else -1.0
            trend.learn(asked(features=(feature,)), sign * feature)
        assert trend.expected(asked(features=(1.0,))) == pytest.approx(sign, abs=0.05)


def test_the_ranker_survives_features_that_say_nothing() -> None:
    predictor = PREDICTORS["ranker"]()
    for draw in range(1000):  # constant and collinear columns: a singular regression
        predictor.observe(asked(f"p{draw}", features=(2.0, 4.0, 0.0)), 500)
    assert math.exp(predictor.predict(asked("new", features=(2.0, 4.0, 0.0))).log_mean) == pytest.approx(500, rel=0.05)


@pytest.mark.parametrize("features", [(1.0,), (1.0, math.nan), (math.inf, 1.0), ()])
def test_the_ranker_refuses_features_it_cannot_use(features: tuple[float, ...]) -> None:
    predictor = PREDICTORS["ranker"]()
    predictor.observe(asked(features=(1.0, 2.0)), 10)
    before = predictor.predict(asked(features=(1.0, 2.0)))
    with refused(InvalidValue, field="features"):
        predictor.observe(asked(features=features), 10)
    with refused(InvalidValue, field="features"):
        predictor.predict(asked(features=features))
    assert predictor.predict(asked(features=(1.0, 2.0))) == before


def test_given_lengths_are_taken_as_they_are() -> None:
    predictor = PREDICTORS["oracle"]()
    estimate = predictor.predict(asked(known=(10, 20, 4000, 5)))
    assert estimate.of_siblings(4) == ([math.log(tokens) for tokens in (10, 20, 4000, 5)], 0.0)
    assert estimate.log_mean == pytest.approx(np.log([10, 20, 4000, 5]).mean())
    assert predictor.predict(asked(known=(70,))).known_tokens == (70,) * 4


def test_without_given_lengths_statistics_answer() -> None:
    given_lengths, statistics = PREDICTORS["oracle"](), PREDICTORS["statistics"]()
    for predictor in (given_lengths, statistics):
        predictor.observe(asked(), 700)
    assert given_lengths.predict(asked()) == statistics.predict(asked())
    assert given_lengths.predict(asked()).of_siblings(4) == (
        [statistics.predict(asked()).log_mean] * 4,
        statistics.predict(asked()).log_sd,
    )


@pytest.mark.parametrize("known", [(10, 20), (10, 20, 30, 0), (-1,)])
def test_given_lengths_must_fit_the_group(known: tuple[int, ...]) -> None:
    with refused(InvalidValue, field="known_tokens"):
        PREDICTORS["oracle"]().predict(asked(known=known))


# --------------------------------------------------------------------------------------------------------------- recall


def recall_of(predicted: Sequence[float], actual: Sequence[float], window: int = 100) -> Recall:
    recall = Recall(window)
    for pair in zip(predicted, actual, strict=True):
        recall.add(*pair)
    return recall


def test_recall_counts_the_longest_that_were_foreseen() -> None:
    actual = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert recall_of(actual, actual).longest() == 1.0
    assert recall_of(actual[::-1], actual).longest() == 0.0
    assert recall_of([0, 0, 0, 0, 0, 0, 0, 9, 0, 5], actual).longest() == 0.5
    assert recall_of([1, 1, 1, 1, 1, 1, 1, 9, 8, 7], actual).longest(0.3) == 1.0


def test_knowing_nothing_recalls_the_share_whatever_the_order() -> None:
    assert recall_of([7.0] * 100, range(100)).longest() == pytest.approx(0.2)
    assert recall_of([7.0] * 100, range(100, 0, -1)).longest() == pytest.approx(0.2)


def test_ties_at_the_limit_are_all_among_the_longest() -> None:
    actual = [30_000] * 5 + [10] * 5
    assert recall_of(actual, actual).longest() == 1.0


def test_recall_looks_at_its_window_only() -> None:
    recall = recall_of([*range(9, -1, -1), *range(10)], [*range(10), *range(10)], window=10)
    assert recall.longest() == 1.0
    assert math.isnan(Recall().longest())


@pytest.mark.parametrize("share", [0.0, 1.1, math.nan])
def test_the_share_of_the_longest_is_a_share(share: float) -> None:
    with refused(InvalidValue, field="share"):
        Recall().longest(share)
    with refused(InvalidValue, field="window", value=0):
        Recall(0)
