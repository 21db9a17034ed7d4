"""How long a step has to be for the longest responses to end within their version's life, and how fast that is.

A decode step's time grows with the KV in use, so a response ends sooner on a DP group that holds less, where its KV
costs more of that group's time. A version lives ``life_steps`` steps of ``s`` seconds: a response of ``l`` tokens needs
``life_steps * s / l`` seconds a token at most, and goes to DP groups filled as far as keeps that pace. The shortest
``s`` is the one in which all DP groups together have the time for a step's responses at these fills:

    sum over responses of (context-tokens / KV held) * seconds a step, at their fill  <=  DP groups * s

With a window so wide that all end in time on full DP groups that is the bubble-free bound.

Those that no full DP group could end in time all end with their version's last step. Where training on their groups
takes a fair part of one, they take turns (turns.py), and have half of that time less on average.
"""

from dataclasses import dataclass

import numpy as np

from dora.orchestrator.core.cost import CostModel
from dora.orchestrator.core.rhythm import LengthMix
from dora.orchestrator.core.table import Column

FILLS = 64  # levels of KV in use that are looked at
HALVINGS = 20
TURNS_STEP = 0.2  # groups take turns where training on those that are hurried takes this share of a step


@dataclass(frozen=True, slots=True)
class Engine:
    """One DP group: what a decode step costs, requests at once, and the KV that it is to hold at most."""

    cost: CostModel
    slots: int
    kv_tokens: float


class Pacing:
    """Of steps of ``groups`` groups of this mix on so many engines. The mix must not be empty.

    ``group_s``: a trainer's time for one group; 0: not known.
    """

    def __init__(
        self, mix: LengthMix, engine: Engine, engines: int, groups: int, life_steps: float, group_s: float = 0.0
    ) -> None:
        context = mix.context_tokens()
        self._kv = np.linspace(1.0 / FILLS, 1.0, FILLS) * min(engine.kv_tokens, engine.slots * context)
        running = np.maximum(1, self._kv / context).astype(np.int64)
        levels = zip(running.tolist(), self._kv.tolist(), strict=True)
        self._pace_s = np.array([engine.cost.decode_step_s(*level) for level in levels])
        classes = mix.classes()
        self._lengths, self._work = mix.tokens[classes] / mix.responses[classes], groups * mix.work[classes]
        self._train_s = groups * group_s * mix.longest[classes]  # of groups, by their longest response
        self._share_s = self._pace_s / self._kv / engines  # of all engines' time, for one context-token
        self._life_steps = life_steps
        self.full_s = float(self._pace_s[-1])  # seconds a token on a full DP group
        self.step_s = self._shortest_s()

    def lane_kv(self, step_s: float) -> float:
        """KV that a DP group may hold for the longest responses to end in time if steps take so long."""
        return float(self._kv[self._levels(step_s)[-1]])

    def hurries(self, step_s: float) -> bool:
        """Whether the longest responses would be late on full DP groups if steps take so long."""
        return bool(self._levels(step_s)[-1] < FILLS - 1)

    def turns_s(self, step_s: float) -> float:
        """How long before the last the first of the hurried groups is to end if steps take so long; 0: all at once."""
        hurried = self._lengths * self.full_s > self._life_steps * step_s
        train_s = float(self._train_s[hurried].sum())
        return train_s if train_s > TURNS_STEP * step_s else 0.0

    def pace_s(self, kv_tokens: float) -> float:
        """Seconds a token on a DP group that holds so much KV."""
        return float(np.interp(kv_tokens, self._kv, self._pace_s))

    def _shortest_s(self) -> float:
        short = float(self._pace_s[0] * self._lengths[-1] / self._life_steps)
        long = max(short * float(self._pace_s[-1] / self._pace_s[0]), self._needed_s(short))
        for _ in range(HALVINGS):
            middle = (short + long) / 2
            if self._needed_s(middle) <= middle:
                long = middle
            else:
                short = middle
        return long

    def _needed_s(self, step_s: float) -> float:
        """Time that a step's responses take of all engines, each as full as lets its responses end in time."""
        return float((self._share_s[self._levels(step_s)] * self._work).sum())

    def _levels(self, step_s: float) -> Column:
        """The fullest level that is fast enough, by class of length; the emptiest where none is."""
        needed_s = (self._life_steps * step_s - self.turns_s(step_s) / 2) / self._lengths
        levels: Column = np.maximum(0, np.searchsorted(self._pace_s, needed_s, side="right") - 1)
        return levels
