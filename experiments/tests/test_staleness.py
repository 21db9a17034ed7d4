"""experiments/staleness: the lagged loop, and what the map says of curves that are known."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from dora.models import resolve_model
from experiments.convergence.page import END
from experiments.staleness.__main__ import FLEET_MARK, MARK, main
from experiments.staleness.cell import Cell
from experiments.staleness.lagged import Lagged
from experiments.staleness.page import markdown
from experiments.staleness.replays import gains
from experiments.staleness.replays import main as replays_command
from experiments.staleness.replays import markdown as table
from experiments.staleness.report import best_rates, costs, points, steps_to_level
from experiments.staleness.sampling import divergence, sampled, token_distributions


def result(lag: int, seed: int, gains: int, movement: float, rate: float = 1e-3) -> dict[str, Any]:
    """A policy whose reward rises evenly to 1 over ``gains`` steps."""
    cell = Cell("tiny", "dapo", rate, lag, seed, steps=100)
    rewards = [0.0] * lag + [min(1.0, step / gains) for step in range(100)]
    return {"cell": cell.specification, "steps": [{"reward": each, "movement": movement} for each in rewards]}


def test_the_level_is_reached_by_the_mean_of_five_versions_whatever_the_lag() -> None:
    assert steps_to_level(result(0, 0, 10, 0.1)) == 12, "0.8, 0.9, 1, 1, 1 have a mean of 0.94; one earlier it is 0.88"
    assert steps_to_level(result(3, 0, 10, 0.1)) == 12
    assert steps_to_level(result(0, 0, 1000, 0.1)) is None


def test_a_lag_is_paired_with_the_same_seeds_without_one() -> None:
    results = [result(0, seed, 20 + seed, 0.01) for seed in range(3)]
    results += [result(2, seed, 40 + 2 * seed, 0.01) for seed in range(2)]
    fresh, lagged = points(results)
    assert (fresh.lag, fresh.seeds, fresh.samples.mean) == (0, 3, 1.0)
    assert (lagged.lag, lagged.seeds, lagged.far) == (2, 2, pytest.approx(0.2))
    assert 1.8 < lagged.samples.mean < 2.0, "twice as slow a rise, and the same five versions at its end"


def test_each_objective_has_its_own_cost() -> None:
    fast = [result(lag, seed, 20 + 10 * lag, 0.25, 1e-3) for lag in (0, 1) for seed in range(2)]
    slow = [result(lag, seed, 20, 0.01, 1e-4) for lag in (0, 1) for seed in range(2)]
    found = points(slow + fast)
    (lost,) = (each.samples.mean - 1.0 for each in found if each.lag and each.learning_rate == 1e-3)
    assert costs(found) == {"dapo": pytest.approx(lost * 0.5 / (0.5**2 + 0.1**2))}
    assert costs(points(slow)) == {"dapo": 0.0} and "| dapo | 0 | any |" in markdown(points(slow), {})


def test_rates_are_chosen_on_seeds_that_are_not_compared() -> None:
    tried = [result(1, seed, gains, 0.1, rate) for seed in (1000, 1001) for gains, rate in ((30, 1e-3), (20, 1e-4))]
    assert best_rates(tried) == {("tiny", "dapo", 1): 1e-4}
    assert points(tried) == []


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(resolve_model("tiny"), dtype=torch.float32).eval()


def test_a_sampled_token_has_the_logprob_of_the_whole_row_also_beside_padding(model: Any) -> None:
    prompts = [[1, 4], [1, 4, 5, 6, 7]]
    found = sampled(model, prompts, [9, 20], {2}, torch.Generator().manual_seed(3))
    assert all(len(each.token_ids) <= most for each, most in zip(found, (9, 20), strict=True))
    rows = token_distributions(model, prompts, found)
    token_ids = [token_id for each in found for token_id in each.token_ids]
    whole = rows[range(len(token_ids)), token_ids].tolist()
    assert whole == pytest.approx([value for each in found for value in each.logprobs], abs=1e-4)
    assert divergence(rows, rows) == 0.0
    assert divergence(rows, rows.roll(1, 0)) > 0.01


def test_a_cell_trains_on_policies_that_are_so_old_and_repeats_itself() -> None:
    torch.set_num_threads(1)
    cell = Cell("tiny", "dapo", 3e-3, lag=2, seed=0, steps=3)
    one, again = Lagged(cell).steps(), Lagged(cell).steps()
    assert len(one) == 5
    assert [step["reward"] for step in one] == [step["reward"] for step in again]
    assert one[0]["effective_sample"] == pytest.approx(1.0, abs=1e-3)
    assert one[4]["effective_sample"] < 0.99, "two steps moved the policy that trains"
    assert all(math.isfinite(step["movement"]) and step["movement"] > 0 for step in one)


def test_a_cell_without_replays_reads_as_it_did() -> None:
    cell = Cell("tiny", "dapo", 1e-3, lag=1, seed=0, steps=3)
    assert cell.name == "tiny-dapo-lr0.001-lag1-seed0"
    assert list(cell.specification) == ["task", "objective", "learning_rate", "lag", "seed", "steps"]
    replaying = replace(cell, replay=0.25, replay_by="priority")
    assert replaying.name == "tiny-dapo-lr0.001-lag1-replay0.25-priority-seed0"
    assert replaying.specification == {**cell.specification, "replay": 0.25, "replay_by": "priority"}


@pytest.mark.full
def test_a_cell_replays_beside_as_many_fresh_groups_and_repeats_itself() -> None:
    torch.set_num_threads(1)
    cell = Cell("tiny", "dapo", 3e-3, lag=1, seed=0, steps=3, replay=0.5, replay_by="priority")
    one, again = Lagged(cell).steps(), Lagged(cell).steps()
    assert one == again
    assert [step["groups_replayed"] for step in one][:2] == [0.0, 8.0], "all of step 0 teach something"
    without = Lagged(replace(cell, replay=0.0)).steps()
    assert one[0]["reward"] == without[0]["reward"] and "groups_replayed" not in without[0]


def test_replay_is_compared_with_the_same_seeds_without_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    without = [result(1, seed, 40, 0.01) for seed in range(3)]
    replayed = [result(1, seed, 20, 0.01) for seed in range(2)]
    for each in replayed:
        each["cell"] |= {"replay": 0.5, "replay_by": "age"}
        each["steps"] = [{**line, "groups_replayed": 4.0} for line in each["steps"]]
    plain, half = gains([*without, *replayed])
    assert (plain.share, plain.seeds, half.share, half.by, half.seeds, half.replayed) == (0.0, 3, 0.5, "age", 2, 4.0)
    assert 0.5 < half.samples.mean < 0.6, "twice as fast a rise, and the same five versions at its end"
    text = table([plain, half])
    assert "| steps without | 0.5 by age |" in text and "| dapo | 0.001 | 3 | 38 | 0.53 ± 0.00 (4.0, 2 of 2) |" in text
    arguments = ["--tell-only", "--seeds", "1", "--out", str(tmp_path)]
    assert replays_command(arguments) == 1, "no cell has a result"
    assert "steps without" in capsys.readouterr().out


def test_the_command_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--tell-only", "--lags", "0", "--objectives", "dapo", "--seeds", "1", "--out", str(tmp_path)]
    assert main(arguments) == 1, "no cell has a result"
    page = tmp_path / "page.md"
    page.write_text(before := f"{MARK}\nkept\n{END}\n{FLEET_MARK}\nkept\n{END}\n")
    assert main([*arguments, "--fleet", "--page", str(page), "--json"]) == 1
    assert '"points": []' in capsys.readouterr().out and page.read_text() == before
