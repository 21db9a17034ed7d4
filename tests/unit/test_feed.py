"""The prompt feed: ends when its source ends, and lets nothing through that would fail later."""

import asyncio

import pytest

from dora.config import validated
from dora.data.types import Prompt
from dora.errors import Conflict, InvalidValue
from dora.orchestrator.rollout.feed import REFUSED_MAX, PromptFeed
from dora.prompts.source import Position, PromptSource
from tests.refusals import refused


def prompts(most: int) -> list[Prompt]:
    return [Prompt(f"p{number}", "task", (1, 2)) for number in range(most)]


def source(most: int) -> PromptSource:
    held = prompts(most)
    return PromptSource("some", "", lambda index: held[index] if index < most else None, most)


@pytest.mark.parametrize("most", [0, 1, 2, 3, 4])
async def test_a_source_that_ends_is_said_to_have_ended(most: int) -> None:
    """Also where its last draw was a short one: else the last step would wait for ever."""
    feed = PromptFeed(validated({"prompts": "some.jsonl"}), source(most))
    taken, exhausted = [], False
    async with asyncio.timeout(10):
        while not exhausted:
            drawn, exhausted = await feed.take(2)
            taken += [prompt.prompt_id for prompt in drawn]
    assert taken == [f"p{number}" for number in range(most)]
    assert feed.closed


async def test_without_a_source_the_feed_waits_for_what_is_submitted() -> None:
    feed = PromptFeed(validated({"prompts": "none"}), source(0))
    waiting = asyncio.ensure_future(feed.take(4))
    await asyncio.to_thread(lambda: None)
    feed.submit(prompts(1))
    assert [prompt.prompt_id for prompt in (await waiting)[0]] == ["p0"]
    waiting = asyncio.ensure_future(feed.take(4))
    await asyncio.sleep(0)
    feed.close()
    assert await waiting == ([], True)


async def test_a_source_without_end_of_impossible_prompts_has_failed() -> None:
    """Not a service that looks alive, reads prompts for ever and admits nothing; nor one that ends."""
    endless = PromptSource("some", "", lambda index: Prompt(f"p{index}", "task", (1,) * 4096))
    feed = PromptFeed(validated({"prompts": "some.jsonl", "workers": {"max_model_len_tokens": 2048}}), endless)
    waiting = asyncio.ensure_future(feed.take(32))
    async with asyncio.timeout(60):
        while not feed.failure:
            await asyncio.to_thread(lambda: None)
    assert feed.failure.startswith(f"{REFUSED_MAX} prompts in a row were refused; the last: prompt p4095: tokens")
    assert feed.refused == REFUSED_MAX and feed.sources_failed == 1
    feed.submit(list(prompts(1)))
    assert [prompt.prompt_id for prompt in (await waiting)[0]] == ["p0"]


async def test_a_prompt_whose_response_fits_no_message_is_refused() -> None:
    """Else its group would be generated, leased to a step, and never be delivered."""
    settings = {"workers": {"max_model_len_tokens": 1 << 20}, "service": {"max_message_bytes": 1 << 20}}
    feed = PromptFeed(validated({"prompts": "none", **settings}), None)
    feed.submit([Prompt("p0", "task", (1, 2), sampling={"max_tokens": 100_000})])
    with refused(
        InvalidValue,
        field="prompt p1: sampling.max_tokens",
        value=110000,
        names=("service.max_message_bytes", "1048576"),
    ):
        feed.submit([Prompt("p1", "task", (1, 2), sampling={"max_tokens": 110_000})])


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"max_tokens": 3.5}, "max_tokens"),
        ({"top_k": 1 << 31}, "top_k"),
        ({"ignore_eos": 0.5}, "ignore_eos"),
        ({"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
        ({"repetition_penalty": 3.0}, "repetition_penalty"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
    ],
)
async def test_what_no_engine_can_sample_is_refused_at_once(sampling: dict[str, float], field: str) -> None:
    feed = PromptFeed(validated({"prompts": "none"}), None)
    with refused(InvalidValue, names=(field,)):
        feed.submit([Prompt("p0", "task", (1, 2), sampling=sampling)])
    assert len(feed) == 0


async def taken(feed: PromptFeed, count: int) -> list[str]:
    return [prompt.prompt_id for prompt in (await feed.take(count))[0]]


async def test_what_was_submitted_goes_by_priority_and_before_the_source() -> None:
    feed = PromptFeed(validated({"prompts": "some.jsonl"}), source(2))
    feed.submit([Prompt(f"q{number}", "", (1,), priority=priority) for number, priority in enumerate((0, -3, 5, 0, 5))])
    assert await taken(feed, 2) == ["q2", "q4"]
    feed.submit([Prompt("late", "", (1,), priority=6)])
    assert await taken(feed, 9) == ["late", "q0", "q3", "q1"]
    assert await taken(feed, 9) == ["p0", "p1"]
    assert feed.position == Position(1, 0)


async def test_a_queued_prompt_is_taken_back_and_its_place_is_free() -> None:
    feed = PromptFeed(validated({"prompts": "none", "service": {"prompts_queued_max": 3}}), None)
    feed.submit(prompts(3))
    assert feed.ledger.cancel("p1") and not feed.ledger.cancel("p1") and not feed.ledger.cancel("nobody")
    assert len(feed) == 2 and feed.ledger.queued_cancelled == 1
    feed.submit([Prompt("p1", "again", (1, 2))])
    assert await taken(feed, 9) == ["p0", "p2", "p1"]
    assert not feed.ledger.cancel("p0")  # it was drawn
    for number in range(500):  # nothing piles up behind the queue
        feed.submit([Prompt(f"n{number}", "", (1,))])
        assert feed.ledger.cancel(f"n{number}")
    assert len(feed.ledger._heap) < 100 and feed.ledger.queued_bytes == 0


async def test_after_its_source_a_feed_may_wait_until_it_is_said_that_no_more_will_come() -> None:
    feed = PromptFeed(validated({"prompts": {"source": "some.jsonl", "then": "wait"}}), source(1))
    assert await taken(feed, 4) == ["p0"]
    waiting = asyncio.ensure_future(feed.take(4))
    await asyncio.sleep(0)
    feed.submit([Prompt("q0", "", (1,))])
    assert [prompt.prompt_id for prompt in (await waiting)[0]] == ["q0"]
    feed.submit([Prompt("q1", "", (1,))])
    assert (feed.end(), feed.end()) == (1, 1)
    with refused(Conflict, field="prompts", value=1):
        feed.submit([Prompt("q2", "", (1,))])
    assert await taken(feed, 4) == ["q1"]
    assert await feed.take(4) == ([], True) and feed.closed


async def test_who_waits_sees_that_no_more_will_come() -> None:
    feed = PromptFeed(validated({"prompts": "none"}), None)
    waiting = asyncio.ensure_future(feed.take(4))
    await asyncio.sleep(0)
    assert feed.end() == 0
    assert await waiting == ([], True)


async def test_after_the_sources_end_a_prompt_is_refused_with_what_would_take_it() -> None:
    feed = PromptFeed(validated({"prompts": "some.jsonl"}), source(0))
    assert await feed.take(1) == ([], True)
    with refused(Conflict, field="prompts", value=1):
        feed.submit(prompts(1))


async def test_no_more_from_clients_leaves_the_source_what_it_has() -> None:
    feed = PromptFeed(validated({"prompts": "some.jsonl"}), source(3))
    feed.end()
    assert await taken(feed, 2) == ["p0", "p1"] and await taken(feed, 2) == ["p2"]
    assert await feed.take(2) == ([], True)
