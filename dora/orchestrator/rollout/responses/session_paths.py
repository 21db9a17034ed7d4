"""The paths through the tokens of a session.

A session keeps its tokens in the order in which they came. Each turn continues a *path*: the tokens up to a place of an
earlier turn, or none. A session without forks has one path, all its tokens. Positions on a path count from its first
response token, so those of a prompt that the environment gave are below 0.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dora.data.token_spans import Column
from dora.data.types import FinishReason, SamplingValue


@dataclass(frozen=True, slots=True)
class InputRun:
    """Describes tokens that an environment gave. They begin a turn of at most ``max_tokens`` sampled tokens."""

    buffer_begin: int  # index of the first among all tokens of the session
    tokens: int
    at: float  # when they came
    max_tokens: int
    name: str  # of what gave them
    before: FinishReason  # how the turn requested before ended
    stop_before: str  # the stop string that ended it
    after_turn: int  # the turn whose path they continue
    first_token: int  # position of the first on the path; minus ``tokens``: they are the prompt of a path of its own
    is_fork: bool  # it does not continue the turn requested before, or is a prompt
    sampling: Mapping[str, SamplingValue] = field(default_factory=dict)  # of the turn, as far as not the session's
    prompt_logprobs: bool = False  # the turn's caller wants the logprobs of all tokens before it

    @property
    def end(self) -> int:
        """Returns the position of the turn's first sampled token."""
        return self.first_token + self.tokens

    @property
    def buffer_end(self) -> int:
        """Returns the index of the turn's first sampled token among all tokens."""
        return self.buffer_begin + self.tokens

    @property
    def is_prompt(self) -> bool:
        return self.first_token < 0


def runs_of(turns: Iterable[Sequence[Any]]) -> list[InputRun]:
    """Returns the input runs of one session from the log's, which ``journal.content.Requests`` describes, in order."""
    runs: list[InputRun] = []
    for buffer_begin, tokens, at, *named in turns:
        prompt_logprobs = named[-1] is True and named.pop()
        sampling = named.pop() if isinstance(named[-1], dict) else {}
        is_fork = len(named) > 4
        place = named[4:] if is_fork else (len(runs), buffer_begin - shift_of(runs))
        max_tokens, name, before, stop_before = named[:4]
        after_turn, first_token = place
        runs.append(
            InputRun(
                buffer_begin,
                tokens,
                at,
                max_tokens,
                name,
                before,
                stop_before,
                after_turn,
                first_token,
                is_fork,
                {name: tuple(value) if isinstance(value, list) else value for name, value in sampling.items()},
                prompt_logprobs,
            )
        )
    return runs


def shift_of(inputs: Sequence[InputRun], turn: int = -1) -> int:
    """Returns what the index of a token has over its position on the path of a turn (-1: the last)."""
    run = inputs[turn - 1 if turn >= 0 else -1] if inputs and turn else None
    return run.buffer_begin - run.first_token if run else 0


def pieces(inputs: Sequence[InputRun], turn: int, end: int) -> list[tuple[int, int]]:
    """Returns the path of a turn as ranges among all tokens, in order. ``end`` is one after the turn's last token."""
    if not shift_of(inputs, turn):
        return [(0, end)]
    found: list[tuple[int, int]] = []
    limit = end - shift_of(inputs, turn)  # positions from there on are those of a later turn
    while True:
        run = inputs[turn - 1] if turn else None
        first = max(0, run.first_token) if run else 0
        if first < limit:
            shift = shift_of(inputs, turn)
            found.append((first + shift, limit + shift))
            limit = first
        if run is None or run.is_prompt:
            return found[::-1]
        turn = run.after_turn


def places(inputs: Sequence[InputRun], turn: int, end: int) -> Column:
    """Returns the path of a turn as indexes among all tokens. ``end`` as in ``pieces``."""
    parts = [np.arange(*piece) for piece in pieces(inputs, turn, end)]
    found: Column = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    return found


def prompt_of(inputs: Sequence[InputRun], turn: int) -> InputRun | None:
    """Returns the given run that is the prompt of a turn's path, or None if that has the prompt of its group."""
    while turn:
        run = inputs[turn - 1]
        if run.is_prompt:
            return run
        turn = run.after_turn
    return None


def fork_of(inputs: Sequence[InputRun], turn: int) -> int:
    """Returns the last turn on the path of a turn with which a branch began, or 0 if there is none."""
    while turn and not inputs[turn - 1].is_fork:
        turn = inputs[turn - 1].after_turn
    return turn


def runs_on(inputs: Sequence[InputRun], turn: int) -> list[InputRun]:
    """Returns the input runs on the path of a turn, in order, with its prompt if they have it."""
    found: list[InputRun] = []
    while turn:
        run = inputs[turn - 1]
        if not found or run.first_token < found[-1].first_token:  # otherwise a later turn has replaced it
            found.append(run)
        turn = 0 if run.is_prompt else run.after_turn
    return found[::-1]


def first_fed(inputs: Sequence[InputRun], turn: int, prompt_tokens: int) -> int:
    """Returns how many tokens an engine newly feeds to sample a turn's first one: at first a path's whole prompt, later
    the last token before the given run, and that run. The group's prompt has ``prompt_tokens``.
    """
    run = inputs[turn - 1] if turn else None
    if run is None or run.is_prompt:
        return run.tokens if run else prompt_tokens
    if not run.is_fork:
        return run.tokens + 1
    first, end = bounds(runs_on(inputs, turn))[-1]  # with the environment tokens that it follows at once
    return end - first + 1


def bounds(runs: Sequence[InputRun]) -> list[tuple[int, int]]:
    """Returns the input runs of a path as (first, one after the last), without its prompt. A run ends where the next
    one has replaced its rest; adjacent runs are one.
    """
    found: list[tuple[int, int]] = []
    for index, run in enumerate(runs):
        if run.is_prompt:
            continue
        end = min([run.end, *(each.first_token for each in runs[index + 1 : index + 2])])
        if found and found[-1][1] == run.first_token:
            found[-1] = (found[-1][0], end)
        else:
            found.append((run.first_token, end))
    return found
