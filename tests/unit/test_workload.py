"""Simulated prompts and response lengths: distributions, epochs, turns, files."""

import itertools
import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dora.errors import InvalidValue
from dora.lab.sim.scenario import Lengths, SimTurns, Workload
from dora.lab.sim.traces import load_histogram, load_trace
from dora.lab.sim.workload import EngineTurn, SimPrompt, WorkloadStream, longest_context_tokens, moments
from tests.refusals import refused


def drawn(workload: Workload, count: int, seed: int = 0, groups_per_step: int = 512) -> list[SimPrompt]:
    return WorkloadStream(workload, seed, groups_per_step).take(count)


def log_lengths(prompts: list[SimPrompt]) -> np.ndarray:
    return np.log([prompt.lengths for prompt in prompts])


def pair_correlation(logs: np.ndarray) -> float:
    """Correlation of two siblings over all groups and pairs."""
    logs = logs - logs.mean()
    siblings = logs.shape[1]
    pairs = (logs.sum(axis=1) ** 2 - (logs**2).sum(axis=1)).mean() / (siblings * (siblings - 1))
    return float(pairs / logs.var())


# --------------------------------------------------------------------------------------------------- the stated numbers


def test_moments_give_the_terms_of_the_bubble_free_bound() -> None:
    of_one = moments(Workload())
    assert of_one.mean_tokens == pytest.approx(2400, rel=1e-3)
    assert of_one.generated_tokens(8192) == pytest.approx(19.66e6, rel=1e-3)
    assert of_one.context_tokens(8192) == pytest.approx(8.04e10, rel=2e-3)


def test_lengths_follow_the_clipped_lognormal() -> None:
    logs = log_lengths(drawn(Workload(prompts=60_000), 60_000))
    tokens = np.exp(logs)
    assert tokens.mean() == pytest.approx(2400, rel=0.02)
    assert np.quantile(tokens, [0.5, 0.9, 0.99]) == pytest.approx([1198, 5574, 19_530], rel=0.03)
    assert (tokens > 29_999).mean() == pytest.approx(0.0036, rel=0.12)
    assert tokens.max() == pytest.approx(30_000) and tokens.min() >= 1
    assert pair_correlation(logs) == pytest.approx(0.6, abs=0.02)


def test_a_million_responses_take_seconds() -> None:
    began = time.process_time()
    assert len(drawn(Workload(), 62_500)) == 62_500
    assert time.process_time() - began < 5.0


# ---------------------------------------------------------------------------------------------------- stream and epochs


def test_same_seed_same_prompts_whatever_the_takes() -> None:
    workload = Workload(prompts=700, turns=SimTurns(most=3, environment_mean_s=2.0))
    whole = drawn(workload, 1500)
    stream = WorkloadStream(workload, 0, 512)
    parts = list(itertools.chain.from_iterable(stream.take(count) for count in (1, 0, 511, 13, 975)))
    assert parts == whole
    assert drawn(workload, 1500, seed=1) != whole


def test_an_epoch_draws_each_prompt_once_and_prompts_keep_what_they_are() -> None:
    size = 700
    prompts = drawn(Workload(prompts=size), 3 * size)
    epochs = [prompts[first : first + size] for first in range(0, 3 * size, size)]
    for epoch in epochs:
        assert len({prompt.key for prompt in epoch}) == size
    assert [prompt.key for prompt in epochs[0]] != [prompt.key for prompt in epochs[1]]
    assert len({prompt.prompt_id for prompt in prompts}) == 3 * size
    first, second = ({prompt.key: prompt for prompt in epoch} for epoch in epochs[:2])
    for key, prompt in first.items():
        again = second[key]
        assert (again.prompt_tokens, again.features, again.task_id) == (
            prompt.prompt_tokens,
            prompt.features,
            prompt.task_id,
        )
        assert again.lengths != prompt.lengths
    means = np.array([[np.log(epoch[key].lengths).mean() for key in sorted(first)] for epoch in (first, second)])
    assert np.corrcoef(means)[0, 1] > 0.9  # the difficulty stays: 0.6 / (0.6 + 0.4 / 16) = 0.96


@pytest.mark.parametrize(("correlation", "distinct"), [(1.0, 1), (0.0, 8)])
def test_siblings_are_as_alike_as_asked(correlation: float, distinct: int) -> None:
    workload = Workload(group_size=8, lengths=Lengths(mu=15, cap_tokens=10**9, group_correlation=correlation))
    for prompt in drawn(workload, 50):
        assert len(set(prompt.lengths)) == distinct


def test_prompt_lengths_are_spread_around_their_mean() -> None:
    tokens = np.array([prompt.prompt_tokens for prompt in drawn(Workload(prompt_tokens=300), 10_000)])
    assert tokens.mean() == pytest.approx(300, rel=0.02)
    assert 16 <= tokens.min() < 100 and 900 < tokens.max() <= 2048


@pytest.mark.parametrize(("mean_tokens", "longest"), [(1, 48), (20, 964), (300, 2048), (2048, 2048)])
def test_no_prompt_is_longer_than_the_longest(mean_tokens: int, longest: int) -> None:
    workload = Workload(prompt_tokens=mean_tokens, prompts=10_000)
    assert longest_context_tokens(workload)[1] == longest
    assert max(prompt.prompt_tokens for prompt in drawn(workload, 10_000)) <= longest


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.85, 1.0])
def test_features_show_the_difficulty_as_well_as_asked(correlation: float) -> None:
    size = 10_000
    lengths = Lengths(mu=12, cap_tokens=10**9, group_correlation=1.0)  # the difficulty itself: nothing is cut
    prompts = drawn(Workload(prompts=size, feature_correlation=correlation, lengths=lengths), size)
    features = np.array([prompt.features for prompt in prompts])
    difficulty = (log_lengths(prompts)[:, 0] - 12) / 1.2
    rows = np.column_stack([np.ones(size), features])
    weights = np.linalg.lstsq(rows, difficulty, rcond=None)[0]
    assert features.std(axis=0) == pytest.approx(1.0, abs=0.03)
    assert (difficulty - rows @ weights).std() == pytest.approx(math.sqrt(1 - correlation**2), abs=0.02)


def test_lengths_do_not_depend_on_the_features() -> None:
    seen, blind = (drawn(Workload(feature_correlation=share), 600) for share in (0.9, 0.1))
    assert [prompt.lengths for prompt in seen] == [prompt.lengths for prompt in blind]
    assert [prompt.features for prompt in seen] != [prompt.features for prompt in blind]


def test_drift_grows_with_every_step() -> None:
    still, drifting = (
        log_lengths(drawn(Workload(lengths=Lengths(cap_tokens=10**9, mu=12, drift_per_step=drift)), 1000, 0, 100))
        for drift in (0.0, 0.05)
    )
    growth = (drifting - still).reshape(10, -1)
    for step in range(10):
        assert growth[step] == pytest.approx(step * math.log(1.05), abs=1e-2)


def test_drift_never_overflows() -> None:
    workload = Workload(prompts=3, group_size=1, lengths=Lengths(drift_per_step=0.49))
    assert drawn(workload, 5000, 0, 1)[-1].lengths == (30_000,)


@pytest.mark.parametrize("groups_per_step", [0, -1])
def test_steps_have_groups(groups_per_step: int) -> None:
    with refused(InvalidValue, field="groups_per_step"):
        WorkloadStream(Workload(), 0, groups_per_step)


# ---------------------------------------------------------------------------------------------------------------- turns


def test_turns_split_each_response() -> None:
    turns = SimTurns(most=6, environment_mean_s=5.0, environment_sigma=0.5, answer_tokens=70)
    prompts = drawn(Workload(turns=turns, lengths=Lengths(mu=3.0)), 2000)
    counts = np.zeros(7)
    waits: list[float] = []
    for prompt in prompts:
        assert len(prompt.turns) == prompt.group_size
        for length, parts in zip(prompt.lengths, prompt.turns, strict=True):
            assert sum(part.tokens for part in parts) == length and min(part.tokens for part in parts) >= 1
            assert (parts[-1].environment_s, parts[-1].answer_tokens) == (0.0, 0)
            assert all(part.answer_tokens == 70 for part in parts[:-1])
            waits.extend(part.environment_s for part in parts[:-1])
            counts[len(parts)] += length >= 6
    assert np.mean(waits) == pytest.approx(5.0, rel=0.02) and min(waits) > 0.0
    assert counts[1:] / counts.sum() == pytest.approx([1 / 6] * 6, abs=0.01)


def test_answers_are_read_with_every_token_after_them() -> None:
    turns = ((EngineTurn(10, 1.0, 100), EngineTurn(20, 0.0, 0)), (EngineTurn(30, 0.0, 0),))
    prompt = replace(drawn(Workload(group_size=2), 1)[0], prompt_tokens=50, lengths=(30, 30), turns=turns)
    assert prompt.context_work() == (50 * 10 + 50) + (160 * 20 + 200) + (50 * 30 + 450)
    workload = Workload(turns=SimTurns(most=4, answer_tokens=300))
    prompts = drawn(workload, 2000)
    of_answers = sum(prompt.context_work() - replace(prompt, turns=()).context_work() for prompt in prompts)
    tokens = sum(map(sum, (prompt.lengths for prompt in prompts)))
    assert of_answers / tokens == pytest.approx(moments(workload).answer_tokens, rel=0.02)


def test_single_turn_workloads_have_no_turns_and_the_same_lengths() -> None:
    plain, split = drawn(Workload(), 20), drawn(Workload(turns=SimTurns(most=4)), 20)
    assert all(prompt.turns == () for prompt in plain)
    assert [prompt.lengths for prompt in plain] == [prompt.lengths for prompt in split]
    assert {part.environment_s for prompt in split for parts in prompt.turns for part in parts} == {0.0}


# ---------------------------------------------------------------------------------------------------------------- files


def histogram_file(folder: Path, weights: dict[str, float]) -> str:
    file = folder / "hist.json"
    file.write_text(json.dumps({"source": "test", "hist": weights}))
    return str(file)


def test_a_histogram_gives_its_own_shares_scaled_and_cut(tmp_path: Path) -> None:
    file = histogram_file(tmp_path, {"100": 5.0, "1000": 3.0, "40": 0.0, "9000": 2.0})
    workload = Workload(lengths=Lengths(kind="histogram", file=file, scale=1.5, cap_tokens=10_000))
    prompts = drawn(workload, 17_000)
    tokens, counts = np.unique([prompt.lengths for prompt in prompts], return_counts=True)
    assert tokens.tolist() == [150, 1500, 10_000]
    assert counts / counts.sum() == pytest.approx([0.5, 0.3, 0.2], abs=0.01)
    assert pair_correlation(log_lengths(prompts)) > 0.4  # the copula's 0.6, less what the steps take
    of_one = moments(workload)
    assert of_one.mean_tokens == pytest.approx(75 + 450 + 2000, rel=1e-4)
    assert of_one.mean_square_tokens == pytest.approx(0.5 * 150**2 + 0.3 * 1500**2 + 0.2 * 1e8, rel=1e-4)


def test_a_trace_gives_arrivals_and_lengths(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 1500, "input_length": 7, "output_length": 20, "hash_ids": [1]}, {"output_length": 600}]
    file.write_text("\n\n".join(json.dumps(line) for line in lines) + "\n")
    trace = load_trace(file)
    assert trace.arrival_s.tolist() == [1.5, 0.0]
    assert trace.input_tokens.tolist() == [7, 0]
    assert trace.output_tokens.tolist() == [20, 600]
    workload = Workload(lengths=Lengths(kind="trace", file=str(file), group_correlation=1.0))
    assert {prompt.lengths for prompt in drawn(workload, 100)} == {(20,) * 16, (600,) * 16}
    assert moments(workload).mean_tokens == pytest.approx(310, rel=1e-4)


TOO_LONG = "1" + 400 * "0"
MALFORMED_HISTOGRAMS = [  # the line, a field of it, the value
    ('{"hist":\n {"5": 1.0,\n "six": 1.0}}', 3, ": tokens", "six"),
    ('{"hist": {"5": 1.0,\n "0": 1.0}}', 2, ": tokens", "0"),
    ('{"hist": {"5": 1.0,\n "6": -1.0}}', 2, ": weight of 6 tokens", -1.0),
    ('{"hist": {"5": 1.0,\n "6": NaN}}', 2, "", "NaN"),
    ('{"hist": {"5": 1.0,\n "6": "7"}}', 2, ": weight of 6 tokens", "7"),
    ('{"hist": {"5": 1.0,\n "6": true}}', 2, ": weight of 6 tokens", True),
    ('{"hist": {"5": 1.0, "5": 2.0}}', 1, "", '{"hist": {"5": 1.0, '),
    ('{"hist":\n {"5": 1.0,}}', 2, "", "}}"),
    ('\n{"hist": {}}', 2, ": hist", {}),
    ('{"hist": {"5": 0}}', 1, ": hist", {"5": 0}),
    ('{"hist": {"5": 1e308, "6": 1e308}}', 1, ": hist", {"5": 1e308, "6": 1e308}),
    (f'{{"hist": {{"5": 1.0,\n "6": {TOO_LONG}}}}}', 2, ": weight of 6 tokens", TOO_LONG),
    ('{"hist": {"5": 1' + 5000 * "0" + "}}", 1, "", '{"hist": {"5": 10000'),
    (f'{{"hist": {{"5": 1.0,\n "{TOO_LONG}": 1.0}}}}', 2, ": tokens", TOO_LONG),
    ('{"hist": [1, 2]}', 1, ": hist", {"hist": [1, 2]}),
    ("[]", 1, ": hist", []),
    ("", 1, "", ""),
    ("[" * 100_000, 1, "", "[" * 20),
]
MALFORMED_TRACES = [
    ('{"output_length": 5}\n{"output_length": 0}', 2, ": output_length", 0),
    ('{"output_length": 5}\n{"output_length": 2.5}', 2, ": output_length", 2.5),
    (f'{{"output_length": 5}}\n{{"output_length": {TOO_LONG}}}', 2, ": output_length", TOO_LONG),
    ('{"output_length": 5}\n{"input_length": 5}', 2, ": output_length", None),
    ('{"output_length": 5}\n\n{"output_length": "5"}', 3, ": output_length", "5"),
    ('{"output_length": 5, "input_length": -1}', 1, ": input_length", -1),
    ('{"output_length": 5}\n{"output_length": 5, "timestamp": -1}', 2, ": timestamp", -1),
    ('{"output_length": 5}\n{"output_length": 5, "timestamp": Infinity}', 2, "", "Infinity"),
    ('{"output_length": 5}\n{"output_length": 5', 2, "", ""),
    ('{"output_length": 5}\n[5]', 2, "", [5]),
    ("\n \n", 1, "", ""),
]


@pytest.mark.parametrize(
    ("load", "text", "line", "field", "value"),
    [(load_histogram, *case) for case in MALFORMED_HISTOGRAMS] + [(load_trace, *case) for case in MALFORMED_TRACES],
)
def test_malformed_files_are_refused_with_file_line_and_reason(
    load: Callable[[Path], object], text: str, line: int, field: str, value: object, tmp_path: Path
) -> None:
    file = tmp_path / "lengths"
    file.write_text(text)
    with refused(InvalidValue, field=f"{file}:{line}{field}", value=value):
        load(file)


@pytest.mark.parametrize("load", [load_histogram, load_trace])
def test_bytes_that_are_no_text_and_files_that_cannot_be_read(load: Callable[[Path], object], tmp_path: Path) -> None:
    file = tmp_path / "lengths"
    file.write_bytes(b'{"output_length": 5}\n\xff')
    with refused(InvalidValue, names=("2",)):
        load(file)
    for path, reason in (
        (tmp_path / "nowhere", "No such file"),
        (tmp_path, "Is a directory"),
        (file / "below", "Not a directory"),
        (tmp_path / "a\0b", "null byte"),
        (tmp_path / (300 * "a"), "too long"),
    ):
        with refused(InvalidValue, field="workload.lengths.file", names=(reason,)):
            load(path)


def test_a_histogram_workload_names_its_file(tmp_path: Path) -> None:
    with refused(InvalidValue, field="workload.lengths.file", value=""):
        WorkloadStream(Workload(lengths=Lengths(kind="histogram")), 0, 1)
