"""Turns of the event loop."""

import asyncio
import itertools

import pytest

from dora.orchestrator.rollout.turns import TURN_S, MessageTurns


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def handled_in_turns(messages: int, message_s: float) -> list[int]:
    """Returns how many of so many simultaneous messages each turn of the loop handles."""
    clock, handled, seen = Clock(), 0, [0]
    turns = MessageTurns(clock)

    async def handle() -> None:
        nonlocal handled
        async with turns:
            handled += 1
            clock.now_s += message_s

    tasks = [asyncio.create_task(handle()) for _ in range(messages)]
    while handled < messages:
        await asyncio.sleep(0)
        seen.append(handled)
    await asyncio.gather(*tasks)
    return [now - before for before, now in itertools.pairwise(seen)]


async def test_short_messages_that_come_at_once_share_a_turn() -> None:
    assert await handled_in_turns(4, TURN_S / 8) == [4]


async def test_a_turn_of_the_loop_is_bounded_and_nobody_is_left_out() -> None:
    counts = await handled_in_turns(100, TURN_S / 4)
    assert sum(counts) == 100 and max(counts) == 4


async def test_who_fails_or_is_cancelled_holds_nobody_up() -> None:
    clock = Clock()
    turns = MessageTurns(clock)
    wrong = ValueError("wrong")
    with pytest.raises(ValueError) as caught:
        async with turns:
            clock.now_s += 2 * TURN_S
            raise wrong
    assert caught.value is wrong

    async def wait() -> None:
        async with turns:
            pass

    async with turns:
        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert waiting.cancelled()
    async with asyncio.timeout(5.0), turns:
        pass
