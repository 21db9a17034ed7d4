"""A trajectory as people read it: its tokens as texts with shades, its turns and segments as bars."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from dora.rpc.dora_pb2 import ShownTrajectory

SHADES: Final = (-0.05, -0.3, -0.7, -1.4, -2.5, -4.0, -7.0)  # a shade's lowest logprob; below the last: the darkest
MARKS: Final = {"\n": "\u23ce\n", "\t": "\u21e5\t"}  # tokens of nothing but white space
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class ShadedText:
    """Text of one shade. ``kind`` is prompt, given or sampled."""

    kind: str
    shade: int
    text: str
    told: str  # of the token, for a pointer; empty where none was sampled


@dataclass(frozen=True, slots=True)
class Bar:
    """A range of tokens. ``begin`` and ``width`` are in thousandths of all."""

    kind: str
    name: str
    begin: float
    width: float
    told: str


def shade_of(logprob: float) -> int:
    """Returns the shade of a logprob, from 0 for almost certain to 7 for very unlikely."""
    return next((shade for shade, lowest in enumerate(SHADES) if logprob >= lowest), len(SHADES))


def pieces(shown: ShownTrajectory, decode: Decode) -> Iterator[ShadedText]:
    """Yields sampled tokens one by one, and others in runs. ``decode`` takes token ids and shows special tokens."""
    ids = np.frombuffer(shown.token_ids, "<i4").tolist()
    logprobs = np.frombuffer(shown.logprobs, "<f4").tolist()
    sampled = np.frombuffer(shown.is_sampled, "u1").tolist()
    at = 0
    while at < len(ids):
        place = shown.first_token + at
        if sampled[at]:
            text, logprob = _text(ids, at, decode), logprobs[at]
            told = f"token {place - shown.prompt_tokens}, id {ids[at]}, logprob {logprob:.3f} ({np.exp(logprob):.1%})"
            yield ShadedText("sampled", shade_of(logprob), text, told)
            at += 1
            continue
        is_prompt, end = place < shown.prompt_tokens, at
        limit = min(len(ids), shown.prompt_tokens - shown.first_token) if is_prompt else len(ids)
        while end < limit and not sampled[end]:
            end += 1
        yield ShadedText("prompt" if is_prompt else "given", 0, decode(ids[at:end]), "")
        at = end


def _text(ids: Sequence[int], at: int, decode: Decode) -> str:
    """Returns the text that a token adds to the one before it: some tokenizers drop a space at the beginning."""
    text = decode(ids[at : at + 1])
    if at:
        before, both = decode(ids[at - 1 : at]), decode(ids[at - 1 : at + 1])
        text = both.removeprefix(before) if both.startswith(before) else text
    return MARKS.get(text, text)


def turn_bars(shown: ShownTrajectory) -> list[Bar]:
    """Returns the given and sampled tokens of each turn, over the response tokens of all branches."""
    total, bars = _held(shown), []
    for turn in shown.turns:
        begin, input_tokens = turn.first_token - turn.given_tokens, turn.given_tokens
        if input_tokens:
            told = f"turn {turn.turn}: {input_tokens:,} tokens given{f' by {turn.name}' if turn.name else ''}"
            bars.append(_bar("given", "", begin, input_tokens, total, told))
        if turn.sampled_tokens:
            told = f"turn {turn.turn}: {turn.sampled_tokens:,} tokens sampled"
            bars.append(_bar("sampled", str(turn.turn), turn.first_token, turn.sampled_tokens, total, told))
    return bars


def worker_bars(shown: ShownTrajectory) -> list[Bar]:
    """Returns the workers that sampled the tokens. ``kind`` says how the request arrived there."""
    total, bars = _held(shown), []
    for segment in shown.worker_history:
        count = segment.last_token - segment.first_token + 1
        told = f"{segment.worker}: {count:,} tokens from {segment.first_token:,} on, {segment.arrival}"
        bars.append(_bar(segment.arrival, segment.worker, segment.first_token, count, total, told))
    return bars


def _held(shown: ShownTrajectory) -> int:
    ends = [segment.last_token + 1 for segment in shown.worker_history]
    ends += [turn.first_token + turn.sampled_tokens for turn in shown.turns]
    return max([1, shown.total_tokens - shown.prompt_tokens, *ends])


def _bar(kind: str, name: str, begin: float, count: float, total: float, told: str) -> Bar:
    return Bar(kind, name, round(1000 * begin / total, 2), max(1.0, round(1000 * count / total, 2)), told)
