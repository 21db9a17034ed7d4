"""A reattaching process is awaited for a while, and reported to the core once."""

import asyncio
from dataclasses import replace

import numpy as np

from dora.core import events as on
from dora.orchestrator.recovery.reattachment import Reattachment, without_doubles

NOTHING = on.RestoredRequests(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.uint8))
RESTORED = on.Restored(0, 0, 2, 2, 2, 0, 1, 0, 0, (), NOTHING)


def joined(name: str, **requests: int) -> on.WorkerJoined:
    return on.WorkerJoined(name, 7, 8, 4096, version=1, requests=requests)


async def test_it_ends_once_all_have_come_that_are_awaited() -> None:
    roll = Reattachment(["w0", "pool-0"])
    came = [
        asyncio.create_task(roll.came("w0", lambda: joined("w0"))),
        asyncio.create_task(roll.came("w9", lambda: joined("w9"))),  # nobody has awaited it
        asyncio.create_task(roll.came("pool-0", lambda: None)),  # it is not known yet how many tokens it holds
    ]
    await roll.ended(60.0)
    assert not roll.is_over
    event = roll.completed(RESTORED)
    assert [worker.worker_id for worker in event.workers] == ["w0", "w9"] and event.pools == ()
    roll.close()
    assert await asyncio.gather(*came) == [True, True, False], "the pool joins later"
    assert roll.is_over


async def test_who_has_gone_again_is_not_told() -> None:
    roll = Reattachment(["w0"])
    came = asyncio.create_task(roll.came("w0", lambda: joined("w0")))
    await roll.ended(60.0)
    came.cancel()
    await asyncio.wait([came])
    assert roll.completed(RESTORED).workers == ()


async def test_one_that_comes_a_second_time_is_told_as_it_came_last() -> None:
    roll = Reattachment(["w0"])
    came = [asyncio.create_task(roll.came("w0", lambda tokens=tokens: joined("w0", r1=tokens))) for tokens in (1, 2)]
    await roll.ended(60.0)
    (worker,) = roll.completed(RESTORED).workers
    assert worker.requests == {"r1": 2}
    roll.close()
    assert await asyncio.gather(*came) == [True, True]


async def test_who_does_not_come_is_not_awaited_for_ever() -> None:
    roll = Reattachment(["w0"])
    await roll.ended(0.01)
    assert roll.completed(RESTORED) == RESTORED


def test_a_request_that_two_have_stays_with_the_one_that_has_more_of_it() -> None:
    one, two = joined("w0", a=5, b=3, c=1), joined("w1", a=6, b=3, d=2)
    assert without_doubles([one, two]) == [
        replace(one, requests={"b": 3, "c": 1}),
        replace(two, requests={"a": 6, "d": 2}),
    ]
