"""Prompts that go in as they are used up, and which of them the service has acknowledged."""

import random
from pathlib import Path
from typing import Any, Final, Self

from dora.client import Prompts
from dora.errors import DoraError
from tests.chaos.breaking import as_breaking, is_breaking
from tests.session_script import as_submitted
from tests.stress.load import prompt_rows
from tests.tools import as_sessions

PROMPTS_AT_ONCE: Final = 32
LENGTHS_TOKENS: Final = (100, 400)
TURN_TOKENS: Final = (20, 80)


def long_rows(count: int, seed: int, sessions: float) -> list[dict[str, Any]]:
    """Prompts whose responses are long enough to be caught on their way, and of as many lengths. ``sessions``: the
    share of prompts with an environment."""
    chance = random.Random(seed)
    rows = prompt_rows(count, seed)
    for row in rows:
        row["sampling"] = {"max_tokens": chance.randint(*LENGTHS_TOKENS), "ignore_eos": True}
    as_sessions(rows, sessions, TURN_TOKENS, seed)
    return rows


class Submitting:
    """Prompts that go in as they are used up. ``accepted``: the ids of those that the service has acknowledged.
    ``breaks``: the folder of ``tests.chaos.breaking``; None: no prompt is for that environment.
    """

    def __init__(self, address: str, token: str, rows: list[dict[str, Any]], breaks: Path | None) -> None:
        self.accepted: set[str] = set()
        self.uncertain: set[str] = set()  # the service was killed before it could say
        self._prompts = Prompts(address, token)
        self._rows = rows
        self._breaks = breaks
        self._sent = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._prompts.close()

    async def submit(self) -> bool:
        """Some more, under ids that nobody has had; whether the service has acknowledged them."""
        first, self._sent = self._sent, self._sent + PROMPTS_AT_ONCE
        rows = [self._row(number) for number in range(first, self._sent)]
        ids = {row["prompt_id"] for row in rows}
        try:
            await self._prompts.submit(rows)
        except DoraError:
            self.uncertain |= ids
            return False
        self.accepted |= ids
        return True

    def _row(self, number: int) -> dict[str, Any]:
        row = {**self._rows[number % len(self._rows)], "prompt_id": f"p{number}"}
        if self._breaks is not None and is_breaking(row["prompt_id"]):
            limits = {"max_tokens": TURN_TOKENS[1]}
            return as_breaking(row, self._breaks) | {"sampling": row["sampling"] | limits}
        return as_submitted(row)

    async def end(self) -> None:
        await self._prompts.end()
