"""Fast lanes: DP groups kept below full, so that responses which would be late at the pace of a full one end in time.

A decode step's time grows with the KV in use. Where the window gives a version less time than its longest responses
take on full DP groups, a few of these are its lanes: each holds the most hurried responses together and no more KV
than leaves them the pace that they need. All others stay full: scattered, the hurried ones would slow every DP group
down. Haste costs least while responses are young and hold little KV: lanes are emptier then than later. Where nobody
else wants a version's DP groups, all spread evenly may be fast enough: a lane fuller than that would be slower. Needs
the cost of an engine (core/cost.py); where that is not known there are no lanes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from dora.orchestrator.core.cost import CostModel
from dora.orchestrator.core.policies.lifespan import Lifespan
from dora.orchestrator.core.policies.outlook import FILL
from dora.orchestrator.core.policies.turns import groups_after, left_in_turn
from dora.orchestrator.core.snapshot import RequestColumns, Snapshot
from dora.orchestrator.core.table import Column

LEAST_FILL = 0.82  # a lane holds at least this share of what the longest responses need: emptier, it costs too much
NEAR_SHARE = 0.03  # a response with less to come than this share of the longest needs no lane any more
AHEAD_TOKENS = 1_500.0  # a lane has room for what its responses will have grown by then
HASTE = 0.25  # a lane's fill grows with this power of its responses' context (``_share_now``)
SPREAD = 1.3  # times an even share of what there is: DP groups hold that where some are lanes, and as responses grow
STICKY = 1.05  # one stays on a lane that is slower than it needs by less than this


@dataclass(slots=True)
class Lane:
    """One DP group, with what it is to hold of hurried responses."""

    seat: int
    pace_s: float  # seconds a token that it keeps
    kv_tokens: float  # KV that it may hold for that
    load: float = 0.0

    def takes(self, share: float, pace_s: float) -> bool:
        """Whether a response that needs this pace, and will hold ``share`` of KV, is well placed here."""
        return self.pace_s <= pace_s * STICKY and self.load + share <= self.kv_tokens


@dataclass(slots=True)
class Lanes:
    """Of one plan."""

    cap: Column  # by seat: KV that it is to hold at most
    hurried: Column  # by row, bool: needs a lane
    by_seat: dict[int, Lane] = field(default_factory=dict)
    to_lane: dict[int, int] = field(default_factory=dict)  # row -> seat, of those that are not where they should be


def plan_lanes(snapshot: Snapshot, stays: Column, lifespan: Lifespan | None, roomy: bool) -> Lanes:
    """The lanes of all versions among the DP groups that stay with theirs (``stays``, bool by seat).

    ``roomy``: versions have these DP groups to themselves, for all that they have begun. What is fast enough where that
    is spread over them evenly needs no lane then: to gather it would make it slower.
    """
    requests, workers = snapshot.requests, snapshot.workers
    found = Lanes(FILL * workers.kv_tokens.astype(np.float64), np.zeros(len(requests.tokens), dtype=bool))
    rows = np.flatnonzero(requests.unfinished & (requests.worker >= 0))
    if snapshot.cost is None or lifespan is None or not lifespan.hurried or not len(rows):
        return found
    remaining = requests.remaining_tokens(rows)
    distant = remaining > NEAR_SHARE * remaining.max()
    rows, remaining = rows[distant], remaining[distant]
    versions = requests.version[rows]
    least_fill = LEAST_FILL * lifespan.lane_fill
    for version in np.unique(versions).tolist():
        free = np.flatnonzero(stays & (workers.loaded == version))
        if len(free):
            its = versions == version
            far, seats = _Far.of(requests, rows[its], remaining[its]), _Seats.of(found, snapshot, free, roomy)
            left_s = _left_s(snapshot, snapshot.cost, far, seats, lifespan, version, least_fill)
            _open(found, snapshot, snapshot.cost, far, seats, left_s, least_fill)
    return found


@dataclass(frozen=True, slots=True)
class _Seats:
    """The DP groups that may be lanes of one version, and what one of them is on average."""

    free: Column  # seats
    kv_tokens: float  # that it is to hold at most
    usual_kv_tokens: float  # and what it will hold as no lane
    held: int  # requests on it, at least 1

    @classmethod
    def of(cls, found: Lanes, snapshot: Snapshot, free: Column, roomy: bool) -> "_Seats":
        kv_tokens, workers = float(found.cap[free].mean()), snapshot.workers
        usual = min(kv_tokens, SPREAD * float(workers.kv_expected[free].mean())) if roomy else kv_tokens
        return cls(free, kv_tokens, usual, max(1, int(workers.held[free].mean())))


@dataclass(frozen=True, slots=True)
class _Far:
    """The responses of one version that have far to go."""

    rows: Column
    seats: Column  # where each is
    groups: Column
    remaining: Column  # tokens to come
    context: Column  # tokens of KV now
    shares: Column  # and what a lane is to have room for
    parts: Column  # how full a lane is to be for each now (``_share_now``)

    @classmethod
    def of(cls, requests: RequestColumns, rows: Column, remaining: Column) -> "_Far":
        context = requests.prompt_tokens[rows] + requests.tokens[rows]
        shares = context + np.minimum(AHEAD_TOKENS, remaining)
        seats, groups = requests.worker[rows], requests.group[rows]
        return cls(rows, seats, groups, remaining, context, shares, _share_now(context, remaining))

    def sorted_by(self, order: Column) -> "_Far":
        return _Far(*(getattr(self, column.name)[order] for column in fields(self)))

    def pace_s(self, left_s: Column | float, cost: CostModel) -> Column:
        """Seconds a token on a lane that is as full as it is to be now, so that each ends within ``left_s``."""
        empty_s = cost.matmul_s(1)  # seconds a step where no KV is in use
        pace_s: Column = empty_s + (left_s / self.remaining - empty_s) * self.parts
        return pace_s


def _left_s(
    snapshot: Snapshot,
    cost: CostModel,
    far: _Far,
    seats: _Seats,
    lifespan: Lifespan,
    version: int,
    least_fill: float,
) -> Column:
    """By row: seconds within which it is to end; its group in turn, as far as the ``seats`` have the room."""
    left_s = lifespan.end_s(version) - snapshot.now_s
    if not lifespan.turn_s or not cost.kv_token_s:
        return np.full(len(far.rows), left_s)
    least, most = least_fill * seats.kv_tokens, seats.kv_tokens
    others = max(0.0, float(snapshot.workers.kv_expected[seats.free].sum() - far.context.sum()))
    room = len(seats.free) - others / most

    def fits(left_s: Column) -> bool:
        kv_tokens = np.clip(cost.kv_tokens_at(seats.held, far.pace_s(left_s, cost)), least, most)
        return float((far.shares / kv_tokens).sum()) <= room

    return left_in_turn(left_s, groups_after(far.groups, far.remaining), lifespan.turn_s, fits)


def _open(
    found: Lanes,
    snapshot: Snapshot,
    cost: CostModel,
    far: _Far,
    seats: _Seats,
    left_s: Column,
    least_fill: float,
) -> None:
    """Lanes on the ``seats`` for one version's responses, each to end within its ``left_s``: most hurried first."""
    hurried = np.flatnonzero(left_s / far.remaining < cost.decode_step_s(seats.held, seats.usual_kv_tokens))
    found.hurried[far.rows[hurried]] = True
    needed_s = far.pace_s(left_s, cost)
    order = hurried[np.argsort(needed_s[hurried], kind="stable")]
    far, needed_s = far.sorted_by(order), needed_s[order]
    free, opened = seats.free, list[Lane]()
    each = zip(far.shares.tolist(), needed_s.tolist(), far.parts.tolist(), strict=True)
    for place, (share, pace_s, part) in enumerate(each):
        if not opened or opened[-1].load + share > opened[-1].kv_tokens:
            if not len(free):
                break
            at = _where_most_are(far.seats[place:], far.shares[place:], least_fill * seats.kv_tokens, free)
            seat, free = int(free[at]), np.delete(free, at)
            opened.append(_lane(seat, pace_s, cost, snapshot, float(found.cap[seat]), least_fill * part))
        opened[-1].load += share
    for lane in opened:
        lane.load = 0.0
        found.by_seat[lane.seat] = lane
        found.cap[lane.seat] = lane.kv_tokens
    _assign(found, opened, far, needed_s)


def _where_most_are(seat_of: Column, shares: Column, kv_tokens: float, free: Column) -> int:
    """The place among the ``free`` seats of the one that holds most of the first responses, as many as fill so much KV.

    There is least to move. Of all the hurried ones most are on a slow lane: as a fast one it would be emptied first.
    """
    first = 1 + int(np.searchsorted(np.cumsum(shares), kv_tokens))
    present = np.bincount(seat_of[:first], weights=shares[:first], minlength=int(free.max()) + 1)
    return int(present[free].argmax())


def _share_now(context: Column, remaining: Column) -> Column:
    """How full a lane is to be for these now, as a share of how full it may be on average until they end; at most 1.

    A step with ``n`` responses of ``c`` tokens takes a + b n c seconds, so a token costs a / n + b c of the DP group's
    time. For a given mean pace that is least where n goes with 1 / sqrt(c), and so the fill, n c, with sqrt(c).
    Lanes come whole, and slots bind on young requests: half of that power (HASTE) is as good (docs/experiments.md).
    """
    start = np.maximum(1.0, context)
    mean = ((start + remaining) ** (1.0 + HASTE) - start ** (1.0 + HASTE)) / ((1.0 + HASTE) * remaining)
    share: Column = start**HASTE / mean
    return share


def _lane(seat: int, pace_s: float, cost: CostModel, snapshot: Snapshot, most: float, least_fill: float) -> Lane:
    held, least = max(1, int(snapshot.workers.held[seat])), least_fill * float(snapshot.workers.kv_tokens[seat])
    fastest_s = cost.decode_step_s(held, least)
    if pace_s <= fastest_s:
        return Lane(seat, fastest_s, least)
    if not cost.kv_token_s:  # the KV in use costs no time
        return Lane(seat, pace_s, most)
    return Lane(seat, pace_s, min(cost.kv_tokens_at(held, pace_s), most))


def _assign(found: Lanes, opened: Sequence[Lane], far: _Far, needed_s: Column) -> None:
    """Each stays where it is if that is a lane fast enough; then the others go to the slowest such lane.

    Were they placed in one order, one that moves would take the place of one that could stay, and so on down the lanes.
    """
    fastest_s = min((lane.pace_s for lane in opened), default=0.0)
    elsewhere: list[tuple[int, float, float]] = []
    columns = (far.rows, far.seats, far.shares, np.maximum(needed_s, fastest_s))
    for row, seat, share, pace_s in zip(*(column.tolist() for column in columns), strict=True):
        lane = found.by_seat.get(seat)
        if lane is not None and lane.takes(share, pace_s):
            lane.load += share
        else:
            elsewhere.append((row, share, pace_s))
    for row, share, pace_s in elsewhere:
        fit = (lane for lane in opened if lane.takes(share, pace_s))
        lane = max(fit, key=lambda lane: (lane.pace_s, -lane.load), default=None)
        if lane is not None:
            lane.load += share
            found.to_lane[row] = lane.seat
