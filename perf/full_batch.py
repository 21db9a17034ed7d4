"""Measures an engine's loss while requests leave it and come: a full batch, whose requests move one after the other."""

import itertools
import statistics
import time
from collections.abc import Sequence

from one_engine import SLOT_TOKENS, SLOTS, Ends, a_request

from dora.kvtransfer.copying import Copying
from dora.kvtransfer.transfer import Transfer

STEPS = 64
ROUNDS = 9
MOVE_EVERY_STEPS = 16


def decode_while_migrating(ends: Ends) -> float:
    """Tokens a second with one request after the other on its way, by those of the same batch left alone."""
    names = [f"b{index}" for index in range(SLOTS)]
    for name in names:
        ends.engine.add(a_request(name, SLOT_TOKENS // 2))
    for _ in range(2 * SLOTS):
        ends.engine.step()
    moving, alone = Moving(ends, names), Moving(ends, ())
    ratios = []
    for _ in range(ROUNDS + 1):
        rate = tokens_per_s(ends, moving)
        moving.settle()
        ratios.append(rate / tokens_per_s(ends, alone))
    for name in names:
        ends.engine.remove(name)
    return statistics.median(ratios[1:])


def tokens_per_s(ends: Ends, moving: "Moving") -> float:
    began_s, tokens = time.perf_counter(), 0
    for step in range(STEPS):
        moving.between_steps(step)
        tokens += len(ends.engine.step())
    return tokens / (time.perf_counter() - began_s)


class Moving:
    """Moves one of these requests every ``MOVE_EVERY_STEPS`` steps; as in a worker nobody waits for a copy."""

    def __init__(self, ends: Ends, names: Sequence[str]) -> None:
        self._ends = ends
        self._next = itertools.cycle(names)
        self._every = MOVE_EVERY_STEPS if names else 0
        self._copying: Copying | None = None
        self._last: Transfer | None = None

    def between_steps(self, step: int) -> None:
        if self._copying is None and self._every and step % self._every == 0:
            self._copying = self._ends.begin_copy(next(self._next))
        self._advance()

    def settle(self) -> None:
        """Until the one on its way has arrived."""
        while self._copying is not None:
            self._ends.engine.step()
            self._advance()

    def _advance(self) -> None:
        if self._copying is not None and self._last is None:
            self._last = self._copying.advance()
        if self._last is not None and self._last.done.done():
            self._ends.engine.remove(self._last.ticket)
            self._ends.engine.take_in(self._ends.target.take(self._last.done.result().key))
            self._copying = self._last = None
