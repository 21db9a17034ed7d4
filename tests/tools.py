"""An environment whose every token follows from its session: ``python -m tests.tools ADDRESS [FILE]``, with DORA_TOKEN.

It may be killed in any turn and between turns, and a second one goes on where it was. With FILE it also opens groups by
itself, and notes there which it has opened. It prints a line of JSON at each turn that it asks for, and at each group
that it has opened. ``tests.session_audit`` checks what became of it.
"""

import asyncio
import itertools
import json
import os
import random
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import dora
from dora.client.sessions import Session
from dora.data.types import Prompt
from dora.errors import Conflict, NotFound
from dora.rpc.errors import ServiceUnavailable
from tests.session_audit import digest
from tests.session_script import TURN_LEAST_TOKENS, asked_of, is_empty, turns_of

ENVIRONMENT: Final = "tools"
PAUSE_MEDIAN_S: Final = 0.2
PAUSE_SPREAD: Final = 1.2  # of its logarithm: one in ten is as long as a second
PAUSE_MOST_S: Final = 4.0
OPENED_AT_ONCE: Final = 2  # groups
OPENED_SIZE: Final = 4  # sessions
OPENED_SAMPLING: Final = {"max_tokens": 40, "min_tokens": TURN_LEAST_TOKENS, "ignore_eos": True}


def as_sessions(rows: Iterable[dict[str, Any]], share: float, max_tokens: tuple[int, int], seed: int) -> None:
    """Makes such a share of the prompts' rows ones of sessions. ``max_tokens``: sampled tokens of one turn."""
    chance = random.Random(f"sessions {seed}")
    for row in rows:
        if chance.random() < share:
            row["environment"] = ENVIRONMENT
            limits = {"max_tokens": chance.randint(*max_tokens), "min_tokens": TURN_LEAST_TOKENS}
            row["sampling"] = {**row["sampling"], **limits}


def say(at: str, **what: Any) -> None:
    print(json.dumps({"at": at, **what}), flush=True)


async def solve(session: Session) -> None:
    """The reward is the number of turns, and the log a digest of all tokens that this environment has seen."""
    chance = random.Random()
    for turn, asked in asked_of(session.prompt_id).items():
        if turn <= session.turn.number:
            continue
        pause_s = PAUSE_MEDIAN_S * chance.lognormvariate(0.0, PAUSE_SPREAD)
        await asyncio.sleep(min(pause_s, PAUSE_MOST_S))
        say("asking", session_id=session.session_id, turn=turn)
        await asked.ask(session)
    await session.end(float(turns_of(session.prompt_id)), log=digest(session.response))


async def attend(address: str, token: str) -> None:
    """Drives sessions for ever, whatever becomes of the service."""
    while True:
        async with dora.Sessions(address, token) as sessions:
            with suppress(ServiceUnavailable):
                await sessions.drive(ENVIRONMENT, solve)
        await asyncio.sleep(0.1)


async def open_groups(address: str, token: str, noted: Path, lane: int) -> None:
    """Opens one group after another, and drives it, until the service takes no more prompts. ``noted``: the file of the
    groups that were opened."""
    for number in itertools.count(lane, OPENED_AT_ONCE):
        prompt_id = f"opened{number}"
        while True:
            async with dora.Sessions(address, token) as sessions:
                try:
                    group = await _opened(sessions, prompt_id, noted)
                    await _solve_all(group)
                    break
                except ServiceUnavailable:
                    await asyncio.sleep(0.1)
                except Conflict:  # the queue is closed
                    return


async def _opened(sessions: dora.Sessions, prompt_id: str, noted: Path) -> list[Session]:
    """Returns the sessions of a group; none if a step has trained on it already."""
    token_ids = () if is_empty(prompt_id) else (9, 10, 11)
    prompt = Prompt(prompt_id, "", token_ids, sampling=OPENED_SAMPLING)
    with noted.open("a+") as file:
        file.seek(0)
        again = prompt_id in file.read().split()
        try:
            group = await sessions.open(prompt, OPENED_SIZE, again=again)
        except NotFound:
            return []
        file.write(f"{prompt_id}\n")
    say("opened", prompt_id=prompt_id)
    return group


async def _solve_all(group: list[Session]) -> None:
    left = [solve(session) for session in group if not session.has_ended]
    for failed in await asyncio.gather(*left, return_exceptions=True):
        if isinstance(failed, ServiceUnavailable):
            raise failed
        if failed is not None:
            raise AssertionError(f"a session has failed: {failed!r}") from failed


async def main(address: str, token: str, opened: str = "") -> None:
    async with asyncio.TaskGroup() as works:
        works.create_task(attend(address, token))
        for lane in range(OPENED_AT_ONCE if opened else 0):
            works.create_task(open_groups(address, token, Path(opened), lane))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], os.environ["DORA_TOKEN"], *sys.argv[2:3]))
