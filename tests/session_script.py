"""The turns of each session of the chaos and stress runs: they follow from its prompt's id, so any process may go on.

A *stretch* is a run of turns that each continue the one before. The first turn of a later stretch forks: it follows an
earlier place, or brings a prompt of its own. So each stretch becomes a branch, and its last turn the branch's end.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from dora.client.sessions import Session

TURNS: Final = (2, 4)
GIVEN_TOKENS: Final = (1, 33)  # in one turn: up to a block and one
PROMPT_TOKENS: Final = (2, 40)
TURN_LEAST_TOKENS: Final = 4  # sampled in each turn, as its prompt's sampling says
FIRST_TOKEN, LAST_TOKEN = 8, 63  # of the tiny models' characters
EMPTY_SHARE: Final = 0.25  # of the prompts
FORK_SHARE: Final = 0.3  # of the turns that may fork
SCORED_SHARE: Final = 0.15  # of the turns but the first


@dataclass(frozen=True, slots=True)
class Asked:
    """A turn but the first: what it gives, and the place that it follows, as in ``Session.ask``."""

    given: tuple[int, ...]
    after_turn: int | None = None  # None: the last one
    first_token: int | None = None  # None: its end
    is_prompt: bool = False
    is_scored: bool = False  # with the logprobs of all tokens before it

    @property
    def forks(self) -> bool:
        return self.is_prompt or self.after_turn is not None

    async def ask(self, session: Session) -> None:
        if self.is_prompt:
            turn = await session.begin(self.given, name="tool", prompt_logprobs=self.is_scored)
        else:
            turn = await session.ask(
                self.given,
                name="tool",
                after_turn=self.after_turn,
                first_token=self.first_token,
                prompt_logprobs=self.is_scored,
            )
        found = () if turn.prompt_logprobs is None else turn.prompt_logprobs.tolist()
        before = len(session.response) - len(turn.token_ids)  # response tokens; the prompt has one at least
        least = len(self.given) - 1 if self.is_prompt else before
        assert len(found) >= least if self.is_scored else not found, f"turn {turn.number}: {len(found)} prompt logprobs"
        assert max(found, default=0.0) <= 0.0


def is_empty(prompt_id: str) -> bool:
    """Returns whether the environment brings the prompt, with turn 1."""
    return random.Random(f"empty {prompt_id}").random() < EMPTY_SHARE


def as_submitted(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a prompt's row, without its prompt if the environment brings it."""
    if "environment" not in row or not is_empty(row["prompt_id"]):
        return row
    return {name: value for name, value in row.items() if name != "messages"} | {"prompt": ""}


def first_turn(prompt_id: str) -> int:
    """Returns the number of the first turn that samples."""
    return int(is_empty(prompt_id))


def turns_of(prompt_id: str) -> int:
    """Returns the number of turns that sample."""
    return random.Random(f"turns {prompt_id}").randint(*TURNS)


def asked_of(prompt_id: str) -> dict[int, Asked]:
    """Returns the turns from 1 on, by number."""
    first, found = first_turn(prompt_id), dict[int, Asked]()
    least = {} if first else {0: TURN_LEAST_TOKENS}  # response tokens on a turn's path, at least
    for turn in range(1, first + turns_of(prompt_id)):
        asked = _asked(random.Random(f"turn {prompt_id} {turn}"), turn, first, found, least)
        after = turn - 1 if asked.after_turn is None else asked.after_turn
        found[turn] = replace(asked, is_scored=random.Random(f"scored {prompt_id} {turn}").random() < SCORED_SHARE)
        before = 0 if asked.is_prompt else least[after] if asked.first_token is None else asked.first_token
        least[turn] = before + len(asked.given) * (not asked.is_prompt) + TURN_LEAST_TOKENS
    return found


def _asked(chance: random.Random, turn: int, first: int, found: dict[int, Asked], least: dict[int, int]) -> Asked:
    if turn == first:
        return Asked(_tokens(chance, PROMPT_TOKENS), is_prompt=True)
    given = _tokens(chance, GIVEN_TOKENS)
    if chance.random() >= FORK_SHARE:
        return Asked(given)
    inner = [each for each in range(first, turn - 1) if not found[each + 1].forks]  # a stretch goes on after them
    kind = chance.choice(("prompt", "cut", *(("whole",) if inner else ())))
    if kind == "prompt":
        return Asked(_tokens(chance, PROMPT_TOKENS), is_prompt=True)
    if kind == "whole":
        return Asked(given, after_turn=chance.choice(inner))
    after = chance.randrange(first, turn)
    return Asked(given, after_turn=after, first_token=chance.randrange(least[after]))


def _tokens(chance: random.Random, most: tuple[int, int]) -> tuple[int, ...]:
    return tuple(chance.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(chance.randint(*most)))


def stretches(prompt_id: str) -> Iterator[list[int]]:
    """Yields the turns of each stretch."""
    first, asked = first_turn(prompt_id), asked_of(prompt_id)
    stretch = [first]
    for turn in range(first + 1, first + turns_of(prompt_id)):
        if asked[turn].forks:
            yield stretch
            stretch = []
        stretch.append(turn)
    yield stretch
