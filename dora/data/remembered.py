"""A sampled response as engines remember it, to draft from it."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from blake3 import blake3

PROMPT_TOKENS: Final = 32  # last ones of a prompt that precede its responses
REMEMBERED_TOKENS_MAX: Final = 8192  # of one response, the last ones


@dataclass(frozen=True, slots=True)
class Remembered:
    """``token_ids`` are up to ``PROMPT_TOKENS`` before what was sampled, then that. Without any, this only says of
    which task a prompt is.
    """

    scope: bytes  # its prompt's
    task: bytes  # of a session: its task's; empty: none
    token_ids: tuple[int, ...]

    @property
    def scopes(self) -> tuple[bytes, ...]:
        return (self.scope, self.task) if self.task else (self.scope,)


def scope_of(prompt_token_ids: Sequence[int]) -> bytes:
    """Returns the name of what was sampled after this prompt. Names of another prompt may be equal, with a chance of
    2**-64; no sample depends on it.
    """
    return blake3(array("i", prompt_token_ids).tobytes()).digest(8)


def task_scope_of(task_id: str) -> bytes:
    """Returns the name of what was sampled in sessions of a task."""
    return blake3(b"task:" + task_id.encode()).digest(8)
