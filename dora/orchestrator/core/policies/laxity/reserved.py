"""Optional, acts only where ``balance.cost`` is set: workers reserved for responses in a hurry, kept below full.

A decode step's time grows with the KV in use, so a response ends sooner on a worker that holds less, where its KV costs
more of that worker's time. Where the window gives a version less time than its longest responses take on full workers,
a few are reserved: each holds the most hurried responses together, and no more KV than leaves them the pace that they
need. All others stay full: scattered, the hurried ones would slow every worker down. A strategy without this module is
the same in every other way: the schedule then reckons with the pace seen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from dora.orchestrator.core.cost import CostModel
from dora.orchestrator.core.policies.board import context_tokens
from dora.orchestrator.core.policies.laxity.tuning import TUNING
from dora.orchestrator.core.rhythm import LengthMix
from dora.orchestrator.core.table import Column
from dora.orchestrator.core.view import RequestColumns, View


@dataclass(frozen=True, slots=True)
class Engine:
    """One worker's: what a decode step costs, requests at once, and the KV that it is to hold at most."""

    cost: CostModel
    slots: int
    kv_tokens: float


class Haste:
    """How long a step must be for the longest responses to end within their version's life, and how full workers are.

    A version lives ``life_steps`` steps of ``s`` seconds: a response of ``l`` tokens needs ``life_steps * s / l``
    seconds a token at most, and goes to workers filled as far as keeps that pace. The shortest ``s`` is the one in
    which all workers together have the time for a step's ``groups`` groups at these fills:

        sum over responses of (context-tokens / KV held) * seconds a step, at their fill  <=  workers * s

    With a window so wide that all end in time on full workers that is the bubble-free bound. The mix must not be empty.
    """

    def __init__(self, mix: LengthMix, engine: Engine, workers: int, groups: int, life_steps: float) -> None:
        context, fills = mix.context_tokens(), TUNING.fills
        self._kv = np.linspace(1.0 / fills, 1.0, fills) * min(engine.kv_tokens, engine.slots * context)
        running = np.maximum(1, self._kv / context).astype(np.int64)
        levels = zip(running.tolist(), self._kv.tolist(), strict=True)
        self._pace_s = np.array([engine.cost.decode_step_s(*level) for level in levels])
        classes = mix.classes()
        self._lengths, self._work = mix.tokens[classes] / mix.responses[classes], groups * mix.work[classes]
        self._share_s = self._pace_s / self._kv / workers  # of all workers' time, for one context-token
        self._life_steps = life_steps
        self.full_s = float(self._pace_s[-1])  # seconds a token on a full worker
        self.step_s = self._shortest_s()

    def at(self, step_s: float, kv_tokens: float) -> tuple[bool, float, float]:
        """If steps take so long: whether the longest responses would be late on full workers, of so much KV; the share
        of it that a reserved worker uses, and its seconds a token."""
        fill = min(TUNING.reserved_fill, self.reserved_kv(step_s) / kv_tokens)
        pace_s = self.pace_s(fill * kv_tokens)
        return self.hurries(step_s) and pace_s < TUNING.worth * self.full_s, fill, pace_s

    def reserved_kv(self, step_s: float) -> float:
        """KV that a worker may hold for the longest responses to end in time if steps take so long."""
        return float(self._kv[self._levels(step_s)[-1]])

    def hurries(self, step_s: float) -> bool:
        """Whether the longest responses would be late on full workers if steps take so long."""
        return bool(self._levels(step_s)[-1] < TUNING.fills - 1)

    def pace_s(self, kv_tokens: float) -> float:
        """Seconds a token on a worker that holds so much KV."""
        return float(np.interp(kv_tokens, self._kv, self._pace_s))

    def _shortest_s(self) -> float:
        short = float(self._pace_s[0] * self._lengths[-1] / self._life_steps)
        long = max(short * float(self._pace_s[-1] / self._pace_s[0]), self._needed_s(short))
        for _ in range(TUNING.halvings):
            middle = (short + long) / 2
            if self._needed_s(middle) <= middle:
                long = middle
            else:
                short = middle
        return long

    def _needed_s(self, step_s: float) -> float:
        """Time that a step's responses take of all workers, each as full as lets its responses end in time."""
        return float((self._share_s[self._levels(step_s)] * self._work).sum())

    def _levels(self, step_s: float) -> Column:
        """The fullest level that is fast enough, by class of length; the emptiest where none is."""
        needed_s = self._life_steps * step_s / self._lengths
        levels: Column = np.maximum(0, np.searchsorted(self._pace_s, needed_s, side="right") - 1)
        return levels


@dataclass(slots=True)
class Reserved:
    """One reserved worker, with what it is to hold of hurried responses."""

    index: int
    pace_s: float  # seconds a token that it keeps
    kv_tokens: float  # KV that it may hold for that
    load: float = 0.0

    def takes(self, share: float, pace_s: float) -> bool:
        """Whether a response that needs this pace, and will hold ``share`` of KV, is well placed here."""
        return self.pace_s <= pace_s * TUNING.sticky and self.load + share <= self.kv_tokens


@dataclass(slots=True)
class Reservation:
    """The reserved workers of one plan; none, but for the caps, where nothing is in a hurry."""

    cap: Column  # by index: KV that it is to hold at most
    hurried: Column  # by row, bool: needs a reserved worker
    by_index: dict[int, Reserved] = field(default_factory=dict)
    to: dict[int, int] = field(default_factory=dict)  # row -> index, of those that are not where they should be

    @classmethod
    def none(cls, view: View) -> "Reservation":
        kv_tokens = TUNING.fill * view.workers.kv_tokens.astype(np.float64)
        return cls(kv_tokens, np.zeros(len(view.requests.tokens), dtype=bool))


def reserve(view: View, stays: Column, end_s: Callable[[int], float], fill: float, roomy: bool) -> Reservation:
    """The reserved workers of all versions among those that stay with theirs (``stays``, bool by index).

    ``end_s``: of a version, when its last response should have ended. ``fill``: share of its KV that one uses.
    ``roomy``: versions have their workers to themselves, for all that they have begun. What is fast
    enough where that is spread over them evenly needs none reserved then: to gather it would make it slower.
    """
    found, requests, workers, cost = Reservation.none(view), view.requests, view.workers, view.cost
    rows = np.flatnonzero(requests.unfinished & (requests.worker >= 0))
    if cost is None or not len(rows):
        return found
    remaining = requests.remaining_tokens(rows)
    distant = remaining > TUNING.near_share * remaining.max()
    rows, remaining = rows[distant], remaining[distant]
    versions = requests.version[rows]
    for version in np.unique(versions).tolist():
        free = np.flatnonzero(stays & (workers.loaded == version))
        if len(free):
            its = versions == version
            far = _Far.of(requests, rows[its], remaining[its])
            left_s = end_s(version) - view.now_s
            kv_tokens, held = float(found.cap[free].mean()), max(1, int(workers.held[free].mean()))
            if roomy:
                kv_tokens = min(kv_tokens, TUNING.spread * float(workers.kv_expected[free].mean()))
            hurried = np.flatnonzero(left_s / far.remaining < cost.decode_step_s(held, kv_tokens))
            found.hurried[far.rows[hurried]] = True
            needed_s = far.pace_s(left_s, cost)
            order = hurried[np.argsort(needed_s[hurried], kind="stable")]  # the most hurried first
            _open(found, view, cost, far.sorted_by(order), needed_s[order], free, TUNING.least_fill * fill)
    return found


@dataclass(frozen=True, slots=True)
class _Far:
    """The responses of one version that have far to go."""

    rows: Column
    indexes: Column  # where each is
    remaining: Column  # tokens to come
    shares: Column  # KV that a reserved worker is to have room for
    parts: Column  # how full it is to be for each now (``_share_now``)

    @classmethod
    def of(cls, requests: RequestColumns, rows: Column, remaining: Column) -> "_Far":
        context = context_tokens(requests)[rows]
        shares = context + np.minimum(TUNING.ahead_tokens, remaining)
        return cls(rows, requests.worker[rows], remaining, shares, _share_now(context, remaining))

    def sorted_by(self, order: Column) -> "_Far":
        return _Far(*(getattr(self, column.name)[order] for column in fields(self)))

    def pace_s(self, left_s: float, cost: CostModel) -> Column:
        """Seconds a token on a reserved worker that is as full as it is to be now, so that each ends in ``left_s``."""
        empty_s = cost.matmul_s(1)  # seconds a step where no KV is in use
        pace_s: Column = empty_s + (left_s / self.remaining - empty_s) * self.parts
        return pace_s


def _open(
    found: Reservation, view: View, cost: CostModel, far: _Far, needed_s: Column, free: Column, least: float
) -> None:
    """Reserves some of the ``free`` indexes for one version's responses, which need these paces: most hurried first."""
    kv_tokens, opened = float(found.cap[free].mean()), list[Reserved]()
    each = zip(far.shares.tolist(), needed_s.tolist(), far.parts.tolist(), strict=True)
    for place, (share, pace_s, part) in enumerate(each):
        if not opened or opened[-1].load + share > opened[-1].kv_tokens:
            if not len(free):
                break
            at = _where_most_are(far.indexes[place:], far.shares[place:], least * kv_tokens, free)
            index, free = int(free[at]), np.delete(free, at)
            opened.append(_reserved(index, pace_s, cost, view, float(found.cap[index]), least * part))
        opened[-1].load += share
    for worker in opened:
        worker.load = 0.0
        found.by_index[worker.index] = worker
        found.cap[worker.index] = worker.kv_tokens
    _assign(found, opened, far, needed_s)


def _where_most_are(index_of: Column, shares: Column, kv_tokens: float, free: Column) -> int:
    """The place among the ``free`` indexes of the one that holds most of the first responses, as many as fill so much KV.

    There is least to move. Of all the hurried ones most are on a slow worker: as a fast one it would be emptied first.
    """
    first = 1 + int(np.searchsorted(np.cumsum(shares), kv_tokens))
    present = np.bincount(index_of[:first], weights=shares[:first], minlength=int(free.max()) + 1)
    return int(present[free].argmax())


def _share_now(context: Column, remaining: Column) -> Column:
    """How full a worker is to be for these now, as a share of how full it may be on average until they end; at most 1.

    A step with ``n`` responses of ``c`` tokens takes a + b n c seconds, so a token costs a / n + b c of the worker's
    time. For a given mean pace that is least where n goes with 1 / sqrt(c), and so the fill, n c, with sqrt(c). Workers
    come whole, and slots bind on young requests: half of that power (``haste``) is as good.
    """
    start, power = np.maximum(1.0, context), 1.0 + TUNING.haste
    mean = ((start + remaining) ** power - start**power) / (power * remaining)
    share: Column = start**TUNING.haste / mean
    return share


def _reserved(index: int, pace_s: float, cost: CostModel, view: View, most: float, least: float) -> Reserved:
    held, least_kv = max(1, int(view.workers.held[index])), least * float(view.workers.kv_tokens[index])
    fastest_s = cost.decode_step_s(held, least_kv)
    if pace_s <= fastest_s:
        return Reserved(index, fastest_s, least_kv)
    if not cost.kv_token_s:  # the KV in use costs no time
        return Reserved(index, pace_s, most)
    return Reserved(index, pace_s, min(cost.kv_tokens_at(held, pace_s), most))


def _assign(found: Reservation, opened: Sequence[Reserved], far: _Far, needed_s: Column) -> None:
    """Each stays where it is if that is fast enough; then the others go to the slowest reserved worker that is.

    Were they placed in one order, one that moves would take the place of one that could stay, and so on.
    """
    fastest_s = min((worker.pace_s for worker in opened), default=0.0)
    elsewhere: list[tuple[int, float, float]] = []
    columns = (far.rows, far.indexes, far.shares, np.maximum(needed_s, fastest_s))
    for row, index, share, pace_s in zip(*(column.tolist() for column in columns), strict=True):
        here = found.by_index.get(index)
        if here is not None and here.takes(share, pace_s):
            here.load += share
        else:
            elsewhere.append((row, share, pace_s))
    for row, share, pace_s in elsewhere:
        fit = (worker for worker in opened if worker.takes(share, pace_s))
        target = max(fit, key=lambda worker: (worker.pace_s, -worker.load), default=None)
        if target is not None:
            target.load += share
            found.to[row] = target.index
