"""An environment of two turns in one file, for the model ``tiny``.

    python examples/two_turns.py --address 127.0.0.1:7070 --prompts 480

The token comes from the environment variable DORA_TOKEN. Each prompt hides a class of characters. The policy samples a
first turn, the environment answers with the name of the class, and the second turn is rewarded for the characters that
belong to it. The prompts do not name the class: a policy that ignores the answer gets a quarter of the reward at most.

Two other processes are needed: the service and a trainer.

    dora serve --model tiny --window 3 --workers 2 --set prompts=none --set reward.function=dora.rewards.tiny:score
    python -m dora.trainers.grpo --address 127.0.0.1:7070 --groups 12 --lr 3e-3
"""

import argparse
import asyncio
import json
import os
import random
from statistics import fmean
from typing import Any

import dora
from dora.client.sessions import Session
from dora.errors import DoraError
from dora.models.tiny_vocabulary import CLASSES, VOCABULARY

ENVIRONMENT = "two-turns"
QUESTION = "?"  # the same prompt for every class
QUESTION_TOKENS, ANSWER_TOKENS = 2, 12  # sampled in the first turn and in the second
SUBMITTED_AT_ONCE = 64


def prompt(number: int, group_size: int) -> dict[str, Any]:
    """A prompt whose class only the environment knows."""
    return {
        "prompt": QUESTION,
        "prompt_id": f"two-turns-{number}",
        "environment": ENVIRONMENT,
        "group_size": group_size,
        "sampling": {"max_tokens": QUESTION_TOKENS, "ignore_eos": True},
        "verifier": {"class": random.Random(number).choice(tuple(CLASSES))},
    }


class TwoTurns:
    """The environment. ``ended`` is set when all of the ``sessions`` have ended."""

    def __init__(self, sessions: int) -> None:
        self.ended = asyncio.Event()
        self._sessions = sessions
        self._rewards: dict[str, float] = {}  # by session

    async def solve(self, session: Session) -> None:
        """Drives one session. It may be at either turn: another process may have left it."""
        hidden = json.loads(session.verifier_json)["class"]
        if session.turn.number == 0:
            await session.ask([VOCABULARY.index(hidden)], max_tokens=ANSWER_TOKENS, name="class")
        answer = [VOCABULARY[token_id] for token_id in session.turn.token_ids]
        reward = sum(character in CLASSES[hidden] for character in answer) / ANSWER_TOKENS
        await session.end(reward, log=f"{hidden}: {answer}")
        self._note(session.session_id, reward)

    def _note(self, session_id: str, reward: float) -> None:
        self._rewards[session_id] = reward
        if len(self._rewards) % SUBMITTED_AT_ONCE == 0 or len(self._rewards) == self._sessions:
            last = list(self._rewards.values())[-SUBMITTED_AT_ONCE:]
            print(f"{len(self._rewards)} sessions, mean reward of the last {len(last)}: {fmean(last):.3f}", flush=True)
        if len(self._rewards) == self._sessions:
            self.ended.set()


async def run(options: argparse.Namespace, token: str) -> None:
    """Submits the prompts and drives their sessions until all have ended."""
    environment = TwoTurns(options.prompts * options.group_size)
    async with dora.Prompts(options.address, token) as prompts, dora.Sessions(options.address, token) as sessions:
        driving = asyncio.create_task(sessions.drive(ENVIRONMENT, environment.solve))
        await prompts.submit([prompt(number, options.group_size) for number in range(options.prompts)])
        await prompts.end()  # the trainer ends once it has trained on them
        ending = asyncio.create_task(environment.ended.wait())
        await asyncio.wait({driving, ending}, return_when=asyncio.FIRST_COMPLETED)
        if driving.done():
            driving.result()
        driving.cancel()
        ending.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--address", default="127.0.0.1:7070", help="host:port of the service")
    parser.add_argument("--prompts", type=int, default=480, help="prompts to submit (%(default)s)")
    parser.add_argument("--group-size", type=int, default=8, help="sessions of a prompt (%(default)s)")
    try:
        asyncio.run(run(parser.parse_args(), os.environ.get("DORA_TOKEN", "")))
    except DoraError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
