"""The prompt feed: ends when its source ends, and lets nothing through that would fail later."""

import asyncio
from collections.abc import Iterator

import pytest

from dora.config import validated
from dora.errors import InvalidValue
from dora.orchestrator.feed import PromptFeed
from dora.types import Prompt


def prompts(count: int) -> Iterator[Prompt]:
    return (Prompt(f"p{number}", "task", (1, 2)) for number in range(count))


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
async def test_a_source_that_ends_is_said_to_have_ended(count: int) -> None:
    """Also where its last draw was a short one: else the last step would wait for ever."""
    feed = PromptFeed(validated({"prompts": "some.jsonl"}), prompts(count), lambda _: None)
    taken, exhausted = [], False
    async with asyncio.timeout(10):
        while not exhausted:
            drawn, exhausted = await feed.take(2)
            taken += [prompt.prompt_id for prompt in drawn]
    assert taken == [f"p{number}" for number in range(count)]
    assert feed.closed


async def test_without_a_source_the_feed_waits_for_what_is_submitted() -> None:
    feed = PromptFeed(validated({"prompts": "none"}), prompts(0), lambda _: None)
    waiting = asyncio.ensure_future(feed.take(4))
    await asyncio.to_thread(lambda: None)
    feed.submit(list(prompts(1)))
    assert [prompt.prompt_id for prompt in (await waiting)[0]] == ["p0"]
    waiting = asyncio.ensure_future(feed.take(4))
    await asyncio.sleep(0)
    feed.close()
    assert await waiting == ([], True)


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
    feed = PromptFeed(validated({"prompts": "none"}), None, lambda _: None)
    with pytest.raises(InvalidValue, match=rf"p0: sampling\.{field} = "):
        feed.submit([Prompt("p0", "task", (1, 2), sampling=sampling)])
    assert len(feed) == 0
