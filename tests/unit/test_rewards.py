"""Rewards run in real processes. Where a function hangs, it hangs: only the runner's time limit ends it."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from dora.data.types import Reward
from dora.errors import InvalidValue
from dora.models.tiny_vocabulary import VOCABULARY, write_tokenizer
from dora.rewards import RewardRunner, answer, counting, tiny
from dora.rewards.verdict import verdict as checked
from tests.refusals import data_words, refused

FUNCTIONS = "tests.unit.reward_functions"
Start = Callable[..., Awaitable[RewardRunner]]


@pytest_asyncio.fixture
async def start() -> AsyncIterator[Start]:
    """Starts runners for functions of FUNCTIONS and closes them at the end."""
    runners: list[RewardRunner] = []

    async def started(function: str, **options: object) -> RewardRunner:
        spec = function if ":" in function else f"{FUNCTIONS}:{function}"
        runners.append(await RewardRunner.start(spec, **options))
        return runners[-1]

    yield started
    for runner in runners:
        await runner.close()


def is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_function_gets_the_response_and_gives_reward_components_and_log(start: Start) -> None:
    runner = await start("echo")
    reward = await runner.score("2+2=", "4", (7, 8, 9), '{"reward": 0.25}')
    assert reward == Reward(value=0.25, components={"tokens": 3.0}, log="2+2=|4")


async def test_responses_without_text_are_decoded_in_the_process(start: Start, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    runner = await start("echo", tokenizer_folder=tmp_path)
    token_ids = [VOCABULARY.index(token) for token in ("a", "7", "\n", "DIGITS", "<eos>")]
    reward = await runner.score("", None, token_ids, '{"reward": 1}')
    assert reward.log == "|a7\nDIGITS"


async def test_prints_and_reads_do_not_touch_the_protocol(start: Start) -> None:
    runner = await start("prints")
    for _ in range(3):
        assert await runner.score("", "", [], "{}") == Reward(value=0.5)


async def test_prints_come_at_once_with_the_response_that_they_are_about(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    """A line without an end, too, of a process that leaves."""
    runner = await start("prints_and_leaves")
    for name in ("g0.1", "g0.2"):
        assert not (await runner.score("", "", [], "{}", name)).valid
    said = capfd.readouterr().err
    assert "g0.1: one\ng0.1: two" in said and "g0.2: one\ng0.2: two" in said


@pytest.mark.parametrize("result", ["NaN", "Infinity", "-Infinity", "null", '"1"', "[1]", '{"components": {}}'])
async def test_a_result_that_is_no_finite_number_is_invalid(start: Start, result: str) -> None:
    runner = await start("returns")
    reward = await runner.score("", "", [], f'{{"result": {result}}}')
    assert not reward.valid and reward.value == 0.0
    assert f"reward function '{FUNCTIONS}:returns' returned" in reward.log and "a finite number" in reward.log
    assert await runner.score("", "", [], '{"result": 1}') == Reward(value=1.0)


@pytest.mark.parametrize(
    ("prompt", "what"),
    [
        ("raise", "raised ZeroDivisionError: no such luck"),
        ("exit", "raised SystemExit: enough"),
        ("die", "ended its process (exit code 7)"),
        ("hang", "took longer than 0.5 s and was stopped"),
    ],
)
async def test_a_function_that_fails_costs_no_sample_and_the_next_call_works(
    start: Start, prompt: str, what: str
) -> None:
    runner = await start("misbehaves", timeout_s=0.5)
    reward = await runner.score(prompt, "", [], "{}")
    assert reward == Reward(value=0.0, log=f"reward function '{FUNCTIONS}:misbehaves' {what}", valid=False)
    assert await runner.score("be good", "", [], "{}") == Reward(value=1.0)


async def test_a_verifier_that_is_no_json_is_invalid(start: Start) -> None:
    runner = await start("echo")
    reward = await runner.score("", "", [], "not JSON")
    assert not reward.valid and "raised JSONDecodeError" in reward.log


async def test_closing_ends_the_processes(start: Start) -> None:
    runner = await start("process_id")
    process_id = int((await runner.score("", "", [], "{}")).value)
    assert is_alive(process_id)
    await runner.close()
    assert not is_alive(process_id)


async def test_calls_that_wait_are_asked_together_and_each_fails_alone(start: Start) -> None:
    """Once calls are known to be short. Whatever one of them does, the others are answered, by another process."""
    runner = await start("misbehaves", timeout_s=0.5)
    await asyncio.gather(*(runner.score("", "", [], "{}") for _ in range(32)))
    prompts = ["", "raise", "", "die", "", "", "hang", "", "exit", ""]
    rewards = await asyncio.gather(*(runner.score(prompt, "", [1, 2], "{}") for prompt in prompts))
    assert [reward.valid for reward in rewards] == [not prompt for prompt in prompts]
    assert "exit code 7" in rewards[3].log and "took longer than 0.5 s" in rewards[6].log


async def test_of_calls_that_are_asked_together_each_gets_its_own_verdict(start: Start) -> None:
    runner = await start("echo")
    await asyncio.gather(*(runner.score("", "", [], '{"reward": 1}') for _ in range(32)))
    calls = (runner.score("", "", [index] * index, f'{{"reward": {index}}}') for index in range(100))
    rewards = await asyncio.gather(*calls)
    assert [(reward.value, reward.components["tokens"]) for reward in rewards] == [(i, i) for i in range(100)]


async def test_a_hanging_call_delays_no_other_worker(start: Start) -> None:
    runner = await start("misbehaves", workers=2, timeout_s=3.0)
    hanging = asyncio.create_task(runner.score("hang", "", [], "{}"))
    good = [await runner.score("be good", "", [], "{}") for _ in range(20)]
    assert all(reward.valid for reward in good) and not hanging.done()
    assert not (await hanging).valid


async def test_a_full_queue_makes_callers_wait_and_loses_nothing(start: Start) -> None:
    runner = await start("echo", queue_max=1)
    calls = (runner.score("", "", [], json.dumps({"reward": i})) for i in range(50))
    rewards = await asyncio.gather(*calls)
    assert [reward.value for reward in rewards] == list(range(50))


async def test_a_cancelled_caller_harms_nobody(start: Start) -> None:
    runner = await start("misbehaves", timeout_s=0.5)
    hanging = asyncio.create_task(runner.score("hang", "", [], "{}"))
    waiting = asyncio.create_task(runner.score("be good", "", [], "{}"))
    await asyncio.wait([hanging], timeout=0.01)
    hanging.cancel()
    assert await waiting == Reward(value=1.0)


async def test_closing_ends_calls_that_wait(start: Start) -> None:
    runner = await start("misbehaves", timeout_s=60.0)
    calls = [asyncio.create_task(runner.score("hang", "", [], "{}")) for _ in range(3)]
    await asyncio.wait(calls, timeout=0.01)
    await runner.close()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    with refused(RuntimeError, names=(runner.spec,)):
        await runner.score("", "", [], "{}")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nonsense", "module:function"),
        ("no_such_module_here:score", "cannot be imported"),
        (f"{FUNCTIONS}:absent", "names no function of"),
        (f"{FUNCTIONS}:Verifier.x", "module:function"),
    ],
)
async def test_a_function_that_cannot_be_loaded_is_refused_at_start(spec: str, message: str) -> None:
    with refused(InvalidValue, field="--reward", names=data_words(message)) as caught:
        await RewardRunner.start(spec, workers=2)
    assert caught.value.field == "--reward" and caught.value.value == spec


@pytest.mark.parametrize("option", ["workers", "timeout_s", "queue_max"])
async def test_options_out_of_range_are_refused(option: str) -> None:
    with refused(InvalidValue, value=0, names=data_words(option)):
        await RewardRunner.start(f"{FUNCTIONS}:echo", **{option: 0})


def test_components_that_are_no_finite_numbers_are_left_out_and_the_reward_counts() -> None:
    assert checked({"reward": 1, "components": {"a": True}}) == {"reward": 1.0, "components": {"a": 1.0}, "log": ""}
    found = checked({"reward": 1, "components": {"a": float("nan"), "b": 2}, "log": "x"})
    assert found == {"reward": 1.0, "components": {"b": 2.0}, "log": "x\n(left out: a)"}
    assert checked({"reward": 1, "components": [1]})["log"] == "(left out: components, which are no mapping)"


@pytest.mark.parametrize("reward", [1.1e6, -1.1e6, 1e39, 1e300, 10**400, float("inf"), float("nan")])
def test_a_reward_beyond_its_bound_is_refused_by_name(reward: float) -> None:
    assert "1,000,000" in checked(reward)["failure"] and "1,000,000" in checked({"reward": reward})["failure"]
    bound = -1e6 if reward < 0 else 1e6
    assert checked(bound)["reward"] == bound


def test_plain_components() -> None:
    assert checked(Reward(0.5, log="x")) == {"reward": 0.5, "components": {}, "log": "x"}


def test_the_tiny_verifier_counts_characters_of_the_class() -> None:
    verifier = {"characters": "0123456789"}
    assert tiny.score("DIGITS", "12ab", [], verifier) == 0.5
    assert tiny.score("DIGITS", "", [], verifier) == 0.0


@pytest.mark.parametrize(
    ("response", "reward", "correct"),
    [
        ("7, 8, 9, 10", 1.0, 1.0),
        ("7 8 9 10.", 1.0, 1.0),
        ("7, 8, 9", 0.75, 0.0),
        ("7, 8, 9, 10, 11", 0.8, 0.0),
        ("Numbers 7 to 10: 7, 8, 9, 10", 1 / 6, 0.0),
        ("8, 9, 10", 0.0, 0.0),
        ("Sure!", 0.0, 0.0),
        ("", 0.0, 0.0),
        ("9" * 5000, 0.0, 0.0),
    ],
)
def test_the_counting_verifier_scores_numbers_in_their_place(response: str, reward: float, correct: float) -> None:
    found = counting.score("", response, [], {"first": 7, "last": 10})
    assert found["reward"] == pytest.approx(reward)
    assert found["components"] == {"correct": correct}
    assert len(found["log"]) < 300


def test_the_answer_verifier_takes_the_last_tag_or_everything() -> None:
    assert answer.score("", "<answer>3</answer> no, <answer> 4 </answer>", [], {"answer": 4})["reward"] == 1.0
    assert answer.score("", " 4\n", [], {"answer": "4"})["reward"] == 1.0
    assert answer.score("", "It is 4", [], {"answer": "4"})["reward"] == 0.0
    with refused(ValueError, names=("--reward",)):
        answer.score("", "4", [], {})


async def test_reasoning_gym_answers_are_scored_by_their_task(start: Start) -> None:
    runner = await start("dora.rewards.reasoning_gym:score")
    verifier_json = json.dumps({"task": "chain_sum", "entry": {"question": "2 + 2 =", "answer": "4", "metadata": {}}})
    right = await runner.score("", "Well. <answer>4</answer>", [], verifier_json)
    partly = await runner.score("", "It is 4.", [], verifier_json)
    wrong = await runner.score("", "5", [], verifier_json)
    assert right.value == 1.0 and right.components == {"correct": 1.0}
    assert 0.0 < partly.value < 1.0 and wrong.value == 0.0
