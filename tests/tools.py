"""An environment whose every token follows from its session: ``python -m tests.tools ADDRESS``, with DORA_TOKEN.

It may be killed in any turn and between turns, and a second one goes on where it was. So a run's record shows whether a
turn was lost, came twice or is another's: ``wrong`` finds that. It prints a line of JSON at each turn that it asks for.
"""

import asyncio
import hashlib
import json
import os
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, Final

import numpy as np

import dora
from dora.client.sessions import Session
from dora.data.trajectory import Trajectory
from dora.data.types import RequestSpec
from dora.rpc.errors import ServiceUnavailable

ENVIRONMENT: Final = "tools"
TURNS: Final = (2, 4)
GIVEN_TOKENS: Final = (1, 33)  # in one turn: up to a block and one
FIRST_TOKEN, LAST_TOKEN = 8, 63  # of the tiny models' characters
PAUSE_MEDIAN_S: Final = 0.2
PAUSE_SPREAD: Final = 1.2  # of its logarithm: one in ten is as long as a second
PAUSE_MOST_S: Final = 4.0
MUST_BE_0: Final = ("sessions_wrong", "sessions_replaced", "sessions_broken_off")


def as_sessions(rows: Iterable[dict[str, Any]], share: float, max_tokens: tuple[int, int], seed: int) -> None:
    """Makes such a share of the prompts' rows ones of sessions. ``max_tokens``: sampled tokens of one turn."""
    chance = random.Random(f"sessions {seed}")
    for row in rows:
        if chance.random() < share:
            row["environment"] = ENVIRONMENT
            row["sampling"] = {**row["sampling"], "max_tokens": chance.randint(*max_tokens)}


def turns_of(prompt_id: str) -> int:
    return random.Random(f"turns {prompt_id}").randint(*TURNS)


def given_of(prompt_id: str, turn: int) -> list[int]:
    """The tokens before this turn, from 1 on."""
    chance = random.Random(f"given {prompt_id} {turn}")
    return [chance.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(chance.randint(*GIVEN_TOKENS))]


def digest(token_ids: Iterable[int]) -> str:
    return hashlib.blake2s(json.dumps([*map(int, token_ids)]).encode()).hexdigest()


async def solve(session: Session) -> None:
    """The reward is the number of turns, and the log a digest of all tokens that this environment has seen."""
    turns, chance = turns_of(session.prompt_id), random.Random()
    for turn in range(session.turn.number + 1, turns):
        pause_s = PAUSE_MEDIAN_S * chance.lognormvariate(0.0, PAUSE_SPREAD)
        await asyncio.sleep(min(pause_s, PAUSE_MOST_S))
        print(json.dumps({"at": "asking", "session_id": session.session_id, "turn": turn}), flush=True)
        await session.ask(given_of(session.prompt_id, turn), name="tool")
    await session.end(float(turns), log=digest(session.response))


async def attend(address: str, token: str) -> None:
    """Drives sessions for ever, whatever becomes of the service."""
    while True:
        async with dora.Sessions(address, token) as sessions:
            with suppress(ServiceUnavailable):
                await sessions.drive(ENVIRONMENT, solve)
        await asyncio.sleep(0.1)


# ------------------------------------------------------------------------------------------------------------ its audit


def audited(trajectories: Iterable[Trajectory], counters: Mapping[str, float]) -> tuple[dict[str, int], list[str]]:
    """A report's fields, and what is wrong with sessions, in sentences. ``counters``: the service's, or none."""
    sessions = [each for each in trajectories if is_session(each)]
    sentences = [sentence for each in sessions if (sentence := wrong(each))]
    replaced, broken_off, *turns = (
        int(counters.get(name, 0)) for name in (*MUST_BE_0[1:], "turns_resumed", "turns_reprefilled")
    )
    return {
        "sessions": len(sessions),
        "turns": sum(len(each.events) + 1 for each in sessions),
        "turns_resumed": turns[0],
        "turns_reprefilled": turns[1],
        "sessions_wrong": len(sentences),
        "sessions_replaced": replaced,
        "sessions_broken_off": broken_off,
    }, sentences


def is_session(trajectory: Trajectory) -> bool:
    return bool(trajectory.events)


def spans(trajectory: Trajectory) -> list[tuple[int, int]]:
    """The sampled tokens of each turn: the first, and one after the last."""
    edges = np.flatnonzero(np.diff(trajectory.loss_mask.astype(np.int8), prepend=0, append=0))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def wrong(trajectory: Trajectory) -> str:
    """What this session's record says that its environment did not do; empty: nothing."""
    found, tokens = spans(trajectory), trajectory.response_token_ids.tolist()
    turns = turns_of(trajectory.prompt_id)
    if len(found) != turns or found[-1][1] != len(tokens):
        return f"{trajectory.trajectory_id} has {len(found)} turns of {turns}"
    for turn, ((_, before), (begin, _)) in enumerate(pairwise(found), start=1):
        if tokens[before:begin] != given_of(trajectory.prompt_id, turn):
            return f"{trajectory.trajectory_id} has other given tokens in turn {turn} than it was given"
    if not trajectory.reward_valid or trajectory.reward != turns:
        return f"{trajectory.trajectory_id} has reward {trajectory.reward} of {turns}"
    if trajectory.verifier_log != digest(tokens):
        return f"{trajectory.trajectory_id} has other tokens than its environment saw"
    return ""


def requests_of(trajectory: Trajectory) -> Sequence[tuple[RequestSpec, int, int]]:
    """Each turn as a request of its own that has everything before it, with its span."""
    found = spans(trajectory)
    given = tuple((end, begin) for (_, end), (begin, _) in pairwise(found))
    token_ids, logprobs = trajectory.response_token_ids.tolist(), trajectory.logprobs.tolist()
    return [
        (
            RequestSpec(
                f"{trajectory.trajectory_id}/{turn}",
                trajectory.behaviour_version,
                tuple(trajectory.prompt_token_ids.tolist()),
                trajectory.sampling,
                tuple(token_ids[:begin]),
                tuple(logprobs[:begin]),
                given=given[:turn],
            ),
            begin,
            end,
        )
        for turn, (begin, end) in enumerate(found)
    ]


if __name__ == "__main__":
    asyncio.run(attend(sys.argv[1], os.environ["DORA_TOKEN"]))
