"""Filters of scored groups: the built-in one, and user functions in real processes."""

import logging
from collections.abc import AsyncIterator

import pytest

from dora.errors import InvalidValue
from dora.rewards import EqualRewards, FilterRunner
from tests.refusals import refused

FUNCTIONS = "tests.unit.reward_functions"


@pytest.fixture
async def runner() -> AsyncIterator[FilterRunner]:
    started = await FilterRunner.start(f"{FUNCTIONS}:keeps")
    yield started
    await started.close()


@pytest.mark.parametrize(
    ("rewards", "kept"), [([0.0, 1.0], True), ([1.0, 1.0, 1.0], False), ([0.0, 0.0], False), ([0.5], True)]
)
async def test_what_has_equal_rewards_is_let_go_unless_it_is_one_alone(rewards: list[float], kept: bool) -> None:
    assert await EqualRewards().keeps("", rewards, "{}") is kept


async def test_a_function_decides_on_the_groups_rewards_and_the_verifiers_data(runner: FilterRunner) -> None:
    assert await runner.keeps("", [0.5, 0.5], '{"least": 1.0}')
    assert not await runner.keeps("", [0.5, 0.25], '{"least": 1.0}')
    assert runner.name == f"{FUNCTIONS}:keeps"


@pytest.mark.parametrize(
    ("prompt", "verifier", "what"),
    [("raise", "{}", "raised ZeroDivisionError"), ("", '{"result": 1}', "returned 1; allowed is True or False")],
)
async def test_one_that_fails_lets_nothing_go(
    runner: FilterRunner, caplog: pytest.LogCaptureFixture, prompt: str, verifier: str, what: str
) -> None:
    with caplog.at_level(logging.ERROR, "dora.rewards"):
        assert await runner.keeps(prompt, [0.0, 0.0], verifier)
    assert what in caplog.text and "the group is kept" in caplog.text


async def test_one_that_is_not_there_is_refused_with_the_setting_s_name() -> None:
    with refused(InvalidValue, field="selection.filter", value="tests.unit.reward_functions:nothing_of_the_kind"):
        await FilterRunner.start(f"{FUNCTIONS}:nothing_of_the_kind")
