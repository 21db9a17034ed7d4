"""The prompt feed: ends when its source ends, and lets nothing through that would fail later."""

import asyncio
from collections.abc import Iterator
from itertools import count

import pytest

from dora.config import validated
from dora.errors import InvalidValue
from dora.orchestrator.feed import REFUSED_MOST, PromptFeed
from dora.types import Prompt


def prompts(most: int) -> Iterator[Prompt]:
    return (Prompt(f"p{number}", "task", (1, 2)) for number in range(most))


@pytest.mark.parametrize("most", [0, 1, 2, 3, 4])
async def test_a_source_that_ends_is_said_to_have_ended(most: int) -> None:
    """Also where its last draw was a short one: else the last step would wait for ever."""
    feed = PromptFeed(validated({"prompts": "some.jsonl"}), prompts(most))
    taken, exhausted = [], False
    async with asyncio.timeout(10):
        while not exhausted:
            drawn, exhausted = await feed.take(2)
            taken += [prompt.prompt_id for prompt in drawn]
    assert taken == [f"p{number}" for number in range(most)]
    assert feed.closed


async def test_without_a_source_the_feed_waits_for_what_is_submitted() -> None:
    feed = PromptFeed(validated({"prompts": "none"}), prompts(0))
    waiting = asyncio.ensure_future(feed.take(4))
    await asyncio.to_thread(lambda: None)
    feed.submit(list(prompts(1)))
    assert [prompt.prompt_id for prompt in (await waiting)[0]] == ["p0"]
    waiting = asyncio.ensure_future(feed.take(4))
    await asyncio.sleep(0)
    feed.close()
    assert await waiting == ([], True)


async def test_a_source_without_end_of_impossible_prompts_has_failed() -> None:
    """Not a service that looks alive, reads prompts for ever and admits nothing; nor one that ends."""
    endless = (Prompt(f"p{number}", "task", (1,) * 4096) for number in count())
    feed = PromptFeed(validated({"prompts": "some.jsonl"}), endless)
    waiting = asyncio.ensure_future(feed.take(32))
    async with asyncio.timeout(60):
        while not feed.failure:
            await asyncio.to_thread(lambda: None)
    assert feed.failure.startswith(f"{REFUSED_MOST} prompts in a row were refused, the last as prompt p4095: tokens")
    assert feed.refused == REFUSED_MOST and feed.sources_failed == 1
    feed.submit(list(prompts(1)))
    assert [prompt.prompt_id for prompt in (await waiting)[0]] == ["p0"]


async def test_a_prompt_whose_response_fits_no_message_is_refused() -> None:
    """Else its group would be generated, leased to a step, and never be delivered."""
    settings = {"workers": {"max_model_len_tokens": 1 << 20}, "service": {"max_message_bytes": 1 << 20}}
    feed = PromptFeed(validated({"prompts": "none", **settings}), None)
    feed.submit([Prompt("p0", "task", (1, 2), sampling={"max_tokens": 100_000})])
    with pytest.raises(InvalidValue, match=r"p1: sampling.max_tokens = 110000 .*service.max_message_bytes 1048576"):
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
    with pytest.raises(InvalidValue, match=rf"p0: sampling\.{field} = "):
        feed.submit([Prompt("p0", "task", (1, 2), sampling=sampling)])
    assert len(feed) == 0
