"""The regimes keep to their rules, the cache's errors are real, and the page follows from the kept results."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from experiments.pinning.cell import LENGTH, MAIN, REGIMES, TURN_TOKENS, VOCABULARY, Task, cells
from experiments.pinning.fleet import LIMIT_S, Fleet, Run
from experiments.pinning.policy import Cache, Decoder, Policy
from experiments.pinning.report import Results, markdown
from experiments.pinning.rollout import Rollout

RUNS: dict[str, Any] = {}


def run(regime: str, **fields: Any) -> Any:
    """The result of a short run; one for all tests that ask for it."""
    cell = replace(MAIN, regime=regime, steps=4, **fields)
    if cell.name not in RUNS:
        RUNS[cell.name] = Rollout(cell).result()
    return RUNS[cell.name]


def test_the_engine_reads_a_row_token_by_token_as_the_trainer_does_at_once() -> None:
    torch.manual_seed(0)
    policy, rows = Policy(VOCABULARY, LENGTH), torch.randint(0, VOCABULARY, (3, LENGTH))
    with torch.no_grad():
        whole = policy(rows).logits.log_softmax(-1).numpy()
    decoder, cache = Decoder(policy), Cache(3, LENGTH)
    for place in range(LENGTH):
        found = decoder.read(cache, np.arange(3), rows[:, place].numpy(), np.full(3, place))
        assert np.abs(found - whole[:, place]).max() < 1e-5


def test_a_pinned_session_has_one_version_exact_logprobs_and_no_token_in_vain() -> None:
    found = run("pinned-3")
    assert found["means"]["oldest"] <= 2
    assert found["totals"]["wasted"] == found["totals"]["again"] == 0
    assert found["errors"]["claimed_max"] < 2e-6 and found["errors"]["claimed_max"] == found["errors"]["token_max"]


def test_kept_kv_is_stale_and_kv_computed_again_is_that_of_the_tokens_version() -> None:
    kept, again = run("kept"), run("again")
    assert kept["errors"]["token_max"] > 1e-3 and kept["totals"]["again"] == 0
    assert again["errors"]["token_max"] < 2e-6 and again["totals"]["again"] > 0
    assert min(kept["errors"]["claimed_max"], again["errors"]["claimed_max"]) > 1e-3


def test_discarded_sessions_waste_their_tokens() -> None:
    update, old = run("update"), run("old")
    assert update["totals"]["discarded"] > old["totals"]["discarded"] and update["totals"]["wasted"] > 0
    assert update["errors"]["claimed_max"] < 2e-6, "what is trained on has one version"


def test_failed_members_are_replaced_or_left_out_or_taught_as_zeros() -> None:
    replaced, dropped, zero = (
        run("pinned-2", failing=0.15, failures=how) for how in ("replaced", "dropped", "reward 0")
    )
    assert replaced["totals"]["failed"] > 0 and dropped["totals"]["failed"] > 0
    assert zero["totals"]["failed"] == 0 and replaced["groups"]["lost"] == 0


@pytest.mark.parametrize("name", ["lookup", "recall"])
def test_a_task_rewards_what_its_tool_named(name: str) -> None:
    task = Task.of(name, "some prompt")
    right = [[each * 4 for each in wanted] for wanted in task.wanted]
    assert task.reward([[0] * TURN_TOKENS[0], *right]) == 1.0
    assert task.reward([[0] * TURN_TOKENS[0], *([(each + 4) % 16 for each in turn] for turn in right)]) == 0.0


def test_every_run_has_a_name_of_its_own_and_the_main_point_has_ten_seeds() -> None:
    every = list(cells())
    assert len({each.name for each in every}) == len(every)
    assert sum(each == replace(MAIN, regime=each.regime, seed=each.seed) for each in every) == 10 * len(REGIMES)


@pytest.mark.full
def test_the_fleet_wastes_tokens_only_if_it_discards() -> None:
    fleets = {rule: Fleet(Run(rule, 2, 0.1)) for rule in ("pinned", "discarded at an update")}
    for fleet in fleets.values():
        fleet.run_until(lambda of=fleet: len(of.lines) == 2, 60 * LIMIT_S)  # type: ignore[misc]
    assert fleets["pinned"].wasted == 0 and fleets["pinned"].lines[-1]["oldest"] <= 1
    assert fleets["discarded at an update"].wasted > 0


def test_the_page_says_which_bars_are_missed() -> None:
    fleets = {"pinned": (120.0, 2), "kept": (60.0, 1), "computed again": (119.0, 2)}
    of = Results(
        {replace(MAIN, regime=each): run(each) for each in ("pinned-3", "kept")},
        {
            Run(rule, 3, 1.0): {"stalled": False, "step_s": step_s, "oldest": oldest}  # type: ignore[arg-type]
            for rule, (step_s, oldest) in fleets.items()
        },
    )
    text = markdown(of)
    assert "| pinned, window 3 (1) |" in text and "| kept, window 3 |" in text
    assert "| 1 | **2.00** (kept, window 3) | 1.01 to 1.01 (computed again, window 3) |" in text
