"""Prompts as long as a trace has them: both distributions are the file's, and what its lines have in common stays."""

import json
import math
from collections import Counter
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from dora.data.validation import validated_as
from dora.errors import InvalidValue
from dora.lab.sim.presets import composed
from dora.lab.sim.run import check_cluster, simulate
from dora.lab.sim.scenario import Lengths, Scenario, SimTask, Workload
from dora.lab.sim.traces import load_trace
from dora.lab.sim.workload import SimPrompt, WorkloadStream, longest_context_tokens, moments
from tests.refusals import refused


def trace_file(folder: Path, lines: list[tuple[int, int]], name: str = "trace.jsonl") -> str:
    """Lines of (prompt tokens, response tokens)."""
    file = folder / name
    file.write_text("\n".join(json.dumps({"input_length": p, "output_length": r, "timestamp": 7}) for p, r in lines))
    return str(file)


def traced(file: str, correlation: float = 0.6, **fields: Any) -> Workload:
    lengths = Lengths(kind="trace", file=file, group_correlation=correlation)
    return Workload(prompt_lengths="trace", lengths=lengths, **fields)


def drawn(workload: Workload, count: int, seed: int = 0) -> list[SimPrompt]:
    return WorkloadStream(workload, seed, 512).take(count)


def scores(values: np.ndarray) -> np.ndarray:
    """Normal scores of values by their rank."""
    ranks = np.argsort(np.argsort(values))
    return np.array([NormalDist().inv_cdf((rank + 0.5) / len(values)) for rank in ranks.tolist()])


# ---------------------------------------------------------------------------------------------------------------- draws


def test_a_prompt_is_a_line_and_its_responses_are_as_without(tmp_path: Path) -> None:
    lines = [(85_123, 20), (16, 600), (3000, 70), (40, 1000)]
    with_prompts = traced(trace_file(tmp_path, lines), correlation=1.0, prompts=4000)
    prompts = drawn(with_prompts, 4000)
    assert {(prompt.prompt_tokens, *set(prompt.lengths)) for prompt in prompts} == set(lines)
    counts = Counter(prompt.prompt_tokens for prompt in prompts)
    assert [counts[tokens] / 4000 for tokens, _ in lines] == pytest.approx([0.25] * 4, abs=0.02)
    without = drawn(with_prompts.model_copy(update={"prompt_lengths": "lognormal"}), 4000)
    assert [prompt.lengths for prompt in prompts] == [prompt.lengths for prompt in without]
    assert [prompt.features for prompt in prompts] == [prompt.features for prompt in without]
    assert max(prompt.prompt_tokens for prompt in without) <= 2048, "only where it is asked for"


def test_both_lengths_have_the_distribution_of_the_file_whatever_the_correlation(tmp_path: Path) -> None:
    lines = [(10 * n, n) for n in range(1, 101)]
    prompts = drawn(traced(trace_file(tmp_path, lines), correlation=0.3, prompts=20_000), 20_000)
    shares = (0.1, 0.5, 0.9)
    assert np.quantile([p.prompt_tokens for p in prompts], shares) == pytest.approx([100, 500, 900], rel=0.05)
    assert np.quantile([n for p in prompts for n in p.lengths], shares) == pytest.approx([10, 50, 90], rel=0.05)


@pytest.mark.parametrize("correlation", [0.0, 0.6, 0.9])
def test_prompt_and_response_have_as_much_in_common_as_siblings(tmp_path: Path, correlation: float) -> None:
    """Lines that rise together; by normal scores sqrt(r), as the prompt knows the group's part of a response."""
    lines = [(n, n) for n in range(1, 3001)]
    prompts = drawn(traced(trace_file(tmp_path, lines), correlation, prompts=10_000, group_size=1), 10_000)
    of_prompts, of_responses = (
        scores(np.array(values)) for values in ([p.prompt_tokens for p in prompts], [p.lengths[0] for p in prompts])
    )
    assert np.corrcoef(of_prompts, of_responses)[0, 1] == pytest.approx(math.sqrt(correlation), abs=0.03)


def test_lines_with_equally_long_responses_differ_by_chance_alone(tmp_path: Path) -> None:
    """Longer prompts stand later in this file, and none of them is the harder for it."""
    lines = [(n, 100) for n in range(1, 501)] + [(n, 200) for n in range(1, 501)]
    prompts = drawn(traced(trace_file(tmp_path, lines), correlation=0.6, prompts=20_000), 20_000)
    tokens = np.array([prompt.prompt_tokens for prompt in prompts])
    means = np.array([np.mean(prompt.lengths) for prompt in prompts])
    assert tokens.mean() == pytest.approx(250.5, rel=0.03)
    assert np.corrcoef(tokens, means)[0, 1] == pytest.approx(0.0, abs=0.03)


def test_a_prompt_keeps_its_length_over_epochs_and_the_seed_draws_it(tmp_path: Path) -> None:
    workload = traced(trace_file(tmp_path, [(n, 1 + n % 7) for n in range(1, 400)]), prompts=300)
    first, second = ({p.key: p.prompt_tokens for p in drawn(workload, 600)[at : at + 300]} for at in (0, 300))
    assert first == second
    assert first != {p.key: p.prompt_tokens for p in drawn(workload, 300, seed=1)}


def test_each_task_may_have_a_trace_of_its_own(tmp_path: Path) -> None:
    other = trace_file(tmp_path, [(9000, 3), (8000, 4)], "other.jsonl")
    tasks = (SimTask(name="chat", share=0.5), SimTask(name="code", share=0.5, file=other))
    workload = traced(trace_file(tmp_path, [(5, 10), (6, 20)]), prompts=200, tasks=tasks)
    found: dict[str, set[int]] = {"chat": set(), "code": set()}
    for prompt in drawn(workload, 200):
        found[prompt.task_id].add(prompt.prompt_tokens)
    assert found == {"chat": {5, 6}, "code": {8000, 9000}}
    assert longest_context_tokens(workload)[1] == 9000


# --------------------------------------------------------------------------------------------------------- bound and KV


@pytest.mark.parametrize(("correlation", "prompt_tokens"), [(1.0, 910.0), (0.0, 550.0)])
def test_the_bound_weighs_prompts_by_the_tokens_after_them(
    tmp_path: Path, correlation: float, prompt_tokens: float
) -> None:
    """Two lines: (100 x 10 + 1000 x 90) / 100 where a response is its line's, the mean prompt where it is not."""
    found = moments(traced(trace_file(tmp_path, [(100, 10), (1000, 90)]), correlation))
    assert found.mean_tokens == pytest.approx(50.0, rel=1e-4)
    assert found.prompt_tokens == pytest.approx(prompt_tokens, rel=2e-3)


def test_the_bound_is_that_of_the_work_that_is_drawn(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    common = rng.standard_normal(2000)
    inputs = np.rint(np.exp(7 + common)).astype(int)
    outputs = np.rint(np.exp(5 + 0.8 * common + 0.6 * rng.standard_normal(2000))).astype(int)
    lines = list(zip(np.maximum(inputs, 1).tolist(), np.maximum(outputs, 1).tolist(), strict=True))
    workload = traced(trace_file(tmp_path, lines), prompts=40_000, group_size=4)
    prompts = drawn(workload, 40_000)
    work = sum(prompt.context_work() for prompt in prompts)
    of_one = moments(workload)
    assert work == pytest.approx(of_one.context_tokens(160_000), rel=0.02)
    assert of_one.prompt_tokens > 1.2 * inputs.mean(), "long prompts have long responses here"


def test_the_kv_holds_the_longest_prompt_of_the_trace(tmp_path: Path) -> None:
    file = trace_file(tmp_path, [(85_000, 20), (300, 600)])
    lengths = {"kind": "trace", "file": file, "cap_tokens": 700}
    workload = {"lengths": lengths, "prompt_lengths": "trace"}
    scenario = composed({"cluster": {"kv_tokens": 85_700}, "workload": workload}, "small")
    with refused(InvalidValue, field="cluster.kv_tokens", value=85699, names=("85700", "85000")):
        check_cluster(composed({"cluster": {"kv_tokens": 85_699}, "workload": workload}, "small"))
    report = simulate(scenario, steps=2, warmup=0, seed=0)
    assert (report.violations, report.lost, report.duplicated) == (0, 0, 0)
    assert report.tokens_per_s > 8 * 4 * 300 / (60 * report.step_time_min), "prompts are counted"


# -------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("second", "value"),
    [
        ({}, None),
        ({"input_length": 0}, 0),
        ({"input_length": -3}, -3),
        ({"input_length": 2.5}, 2.5),
        ({"input_length": "7"}, "7"),
        ({"input_length": True}, True),
        ({"input_length": None}, None),
        ({"input_length": 2**30 + 1}, 2**30 + 1),
    ],
)
def test_a_line_without_a_prompt_is_refused_where_prompts_are_asked_for(
    tmp_path: Path, second: dict[str, Any], value: object
) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"output_length": 5, "input_length": 9}\n' + json.dumps({"output_length": 5, **second}))
    with refused(InvalidValue, field=f"{file}:2: input_length", value=value) as caught:
        WorkloadStream(traced(str(file)), 0, 1)
    if second in ({}, {"input_length": 0}, {"input_length": 2**30 + 1}):
        assert f"1 to {2**30}" in caught.value.allowed and "workload.prompt_lengths" in caught.value.allowed
        assert load_trace(file).output_tokens.tolist() == [5, 5], "as ever where they are not"


@pytest.mark.parametrize(
    ("workload", "field", "value", "cause"),
    [
        ({}, "workload.prompt_lengths", "trace", "lengths.kind is lognormal"),
        (
            {"lengths": {"kind": "histogram", "file": "x"}},
            "workload.prompt_lengths",
            "trace",
            "lengths.kind is histogram",
        ),
        (
            {
                "lengths": {"kind": "trace", "file": "x"},
                "tasks": [{"name": "a", "share": 1.0, "prompt_tokens": 5}],
            },
            "workload.tasks.0.prompt_tokens",
            5,
            "workload.prompt_lengths is trace",
        ),
    ],
)
def test_prompts_of_a_trace_need_a_trace(workload: dict[str, Any], field: str, value: object, cause: str) -> None:
    with refused(InvalidValue, field=field, value=value, names=(cause,)):
        validated_as(Scenario, {"workload": {"prompt_lengths": "trace", **workload}})
