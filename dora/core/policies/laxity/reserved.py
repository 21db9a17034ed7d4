"""Reserves workers for hurried responses and keeps these workers below full. Optional: requires ``balance.cost``.

A decode step takes longer if more KV is in use. Responses that would be late at the pace of full workers are gathered
on a few workers. These hold only as much KV as allows the required pace. If such responses were scattered, every worker
would have to be slow.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dora.core.forecast.cost import CostModel
from dora.core.forecast.rates import LengthMix
from dora.core.policies.board import context_tokens
from dora.core.policies.laxity.tuning import TUNING
from dora.core.table import Column
from dora.core.view import RequestColumns, View


class Haste:
    """The shortest step in which the longest responses end within their version's life, and how full workers are then.

    A response of ``l`` tokens, whose version lives ``life_steps`` steps of ``s`` seconds, runs on workers that are
    filled up to the level at which a token takes ``life_steps * s / l`` seconds. The shortest ``s`` is the one that has
    time for a step's groups: sum of (context-tokens / KV held) * seconds a decode step, at these fills <= workers * s.
    """

    def __init__(
        self, mix: LengthMix, cost: CostModel, most: tuple[int, float], workers: int, groups: int, lifetime_steps: float
    ) -> None:
        """``mix`` is not empty. ``most`` limits a worker's requests and KV."""
        slots, kv_tokens = most
        context, fills = mix.context_tokens(), TUNING.fills
        self._kv = np.linspace(1.0 / fills, 1.0, fills) * min(kv_tokens, slots * context)
        running = np.maximum(1, self._kv / context).astype(np.int64)
        levels = zip(running.tolist(), self._kv.tolist(), strict=True)
        self._pace_s = np.array([cost.decode_step_s(*level) for level in levels])
        classes = mix.classes()
        self._lengths, self._work = mix.tokens[classes] / mix.responses[classes], groups * mix.work[classes]
        self._share_s = self._pace_s / self._kv / workers  # share of all workers' time for one context-token
        self._lifetime_steps = lifetime_steps
        self.step_s = self._shortest_s()

    def at(self, step_s: float, kv_tokens: float) -> tuple[bool, float, float]:
        """Returns, for steps of ``step_s``, whether the longest responses would be late on workers with ``kv_tokens``
        of KV in use, the share of it that a reserved worker uses so that they end in time, and its seconds per token.
        """
        level = self._levels(step_s)[-1]
        fill = min(TUNING.reserved_fill, float(self._kv[level]) / kv_tokens)
        pace_s = float(np.interp(fill * kv_tokens, self._kv, self._pace_s))
        return bool(level < TUNING.fills - 1) and pace_s < TUNING.worth * float(self._pace_s[-1]), fill, pace_s

    def _shortest_s(self) -> float:
        short = float(self._pace_s[0] * self._lengths[-1] / self._lifetime_steps)
        long = max(short * float(self._pace_s[-1] / self._pace_s[0]), self._needed_s(short))
        for _ in range(TUNING.halvings):
            middle = (short + long) / 2
            if self._needed_s(middle) <= middle:
                long = middle
            else:
                short = middle
        return long

    def _needed_s(self, step_s: float) -> float:
        """Time of all workers for a step's responses, if each worker is as full as its responses' deadline allows."""
        return float((self._share_s[self._levels(step_s)] * self._work).sum())

    def _levels(self, step_s: float) -> Column:
        """The fullest level that is fast enough, by length class; the emptiest level if none is."""
        needed_s = self._lifetime_steps * step_s / self._lengths
        levels: Column = np.maximum(0, np.searchsorted(self._pace_s, needed_s, side="right") - 1)
        return levels


@dataclass(slots=True)
class Reserved:
    """One reserved worker and its load of hurried responses."""

    index: int
    pace_s: float  # seconds per token that it keeps
    kv_tokens: float  # KV limit for that pace
    load: float = 0.0

    def takes(self, share: float, pace_s: float) -> bool:
        """Returns whether a response that needs this pace and ``share`` of KV fits here."""
        return self.pace_s <= pace_s * TUNING.sticky and self.load + share <= self.kv_tokens


@dataclass(slots=True)
class ReservedWorkers:
    """The reserved workers of one plan. It holds only KV limits if no response is in a hurry."""

    cap: Column  # by index: KV limit
    hurried: Column  # by row, bool: needs a reserved worker
    by_index: dict[int, Reserved] = field(default_factory=dict)
    to: dict[int, int] = field(default_factory=dict)  # row -> index, for requests that should move

    @classmethod
    def none(cls, view: View) -> "ReservedWorkers":
        kv_tokens = TUNING.fill * view.workers.kv_tokens.astype(np.float64)
        return cls(kv_tokens, np.zeros(len(view.requests.tokens), dtype=bool))


def reserve(view: View, stays: Column, end_s: Callable[[int], float], fill: float) -> ReservedWorkers:
    """The reserved workers of all versions among those that keep theirs (``stays``, bool by index).

    ``end_s`` gives the time by which a version's last response should end, and ``fill`` is the share of its KV that a
    reserved worker uses.
    """
    found, requests, workers, cost = ReservedWorkers.none(view), view.requests, view.workers, view.cost
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
            full_s = cost.decode_step_s(max(1, int(workers.assigned[free].mean())), float(found.cap[free].mean()))
            left_s = end_s(version) - view.now_s
            own_s = full_s * workers.step_scale[requests.worker[rows]]
            late = np.flatnonzero((versions == version) & (left_s / remaining < own_s))
            far = _Far.of(requests, rows[late], remaining[late], left_s, cost.matmul_s(1))
            _open(found, view, cost, far, free, TUNING.least_fill * fill)
    return found


@dataclass(frozen=True, slots=True)
class _Far:
    """Responses of one version that would be late on a full worker, the most urgent first."""

    rows: Column
    indexes: Column  # the worker of each
    shares: Column  # KV that each needs on a reserved worker
    parts: Column  # fill that each allows now (``_share_now``)
    needed_s: Column  # seconds per token at that fill, to end in time

    @classmethod
    def of(cls, requests: RequestColumns, rows: Column, remaining: Column, left_s: float, empty_s: float) -> "_Far":
        """``empty_s`` is the seconds per token on a worker that holds no KV."""
        context = context_tokens(requests)[rows]
        parts = _share_now(context, remaining)
        needed_s = empty_s + (left_s / remaining - empty_s) * parts
        shares = context + np.minimum(TUNING.ahead_tokens, remaining)
        order = np.argsort(needed_s, kind="stable")
        return cls(*(column[order] for column in (rows, requests.worker[rows], shares, parts, needed_s)))


def _open(found: ReservedWorkers, view: View, cost: CostModel, far: _Far, free: Column, least_fill: float) -> None:
    """Reserves as many of the ``free`` indexes as these responses fill, and assigns the responses."""
    found.hurried[far.rows] = True
    kv_tokens, opened = float(found.cap[free].mean()), list[Reserved]()
    each = zip(far.shares.tolist(), far.needed_s.tolist(), far.parts.tolist(), strict=True)
    for place, (share, needed_s, part) in enumerate(each):
        if not opened or opened[-1].load + share > opened[-1].kv_tokens:
            if not len(free):
                break
            scales = view.workers.step_scale[free]
            fastest = free[scales == scales.min()]
            at = _where_most_are(far.indexes[place:], far.shares[place:], least_fill * kv_tokens, fastest)
            index = int(fastest[at])
            free, own = free[free != index], cost.scaled(float(view.workers.step_scale[index]))
            opened.append(_reserved(index, needed_s, own, view, float(found.cap[index]), least_fill * part))
        opened[-1].load += share
    for worker in opened:
        worker.load = 0.0
        found.by_index[worker.index], found.cap[worker.index] = worker, worker.kv_tokens
    _assign(found, opened, far)


def _where_most_are(index_of: Column, shares: Column, kv_tokens: float, free: Column) -> int:
    """The position in ``free`` of the worker that holds most of the first responses, so that the fewest move."""
    first = 1 + int(np.searchsorted(np.cumsum(shares), kv_tokens))
    present = np.bincount(index_of[:first], weights=shares[:first], minlength=int(free.max()) + 1)
    return int(present[free].argmax())


def _share_now(context: Column, remaining: Column) -> Column:
    """The fill of a worker for these responses now, as a share of its mean fill until they end; at most 1.

    If n responses with context c run, a token costs a / n + b c of the worker's time. The cost is least if the fill is
    proportional to sqrt(c).
    """
    start, power = np.maximum(1.0, context), 1.0 + TUNING.haste
    mean = ((start + remaining) ** power - start**power) / (power * remaining)
    share: Column = start**TUNING.haste / mean
    return share


def _reserved(index: int, pace_s: float, cost: CostModel, view: View, most: float, least: float) -> Reserved:
    assigned, least_kv = max(1, int(view.workers.assigned[index])), least * float(view.workers.kv_tokens[index])
    fastest_s = cost.decode_step_s(assigned, least_kv)
    if pace_s <= fastest_s:
        return Reserved(index, fastest_s, least_kv)
    costs = cost.kv_token_s > 0.0  # otherwise a full worker is as fast
    return Reserved(index, pace_s, min(cost.kv_tokens_at(assigned, pace_s), most) if costs else most)


def _assign(found: ReservedWorkers, opened: Sequence[Reserved], far: _Far) -> None:
    """Keeps each response in place if its worker is fast enough, then gives the others to the slowest one that is."""
    fastest_s = min((worker.pace_s for worker in opened), default=0.0)
    elsewhere: list[tuple[int, float, float]] = []
    columns = (far.rows, far.indexes, far.shares, np.maximum(far.needed_s, fastest_s))
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
