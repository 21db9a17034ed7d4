"""DP groups by the KV that versions need: who gives up, who gets, which requests move for it."""

from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from math import ceil, inf

import numpy as np

from dora.orchestrator.core.policies.hosts import cover, plannable, present_targets, staying
from dora.orchestrator.core.policies.lanes import Lanes, plan_lanes
from dora.orchestrator.core.policies.lifespan import Lifespan
from dora.orchestrator.core.policies.outlook import FILL
from dora.orchestrator.core.policies.stride import leading
from dora.orchestrator.core.snapshot import Move, Snapshot
from dora.orchestrator.core.table import Column

HORIZON_TOKENS = 1_500.0  # a version needs room for what its requests will have grown to by then
LEVEL_TOKENS = 600.0  # DP groups are levelled by the KV they will hold after so many tokens, where that is more
AMPLE = 2.0  # times the KV that all that has begun and a step to come, at full length, can fill: none is packed tight
PRESSED = 0.90  # share of a DP group's KV above which it is relieved, as far as another one is this much emptier:
LEVEL_GAP = 0.06


class Demand:
    """One snapshot's supply and demand."""

    def __init__(
        self,
        snapshot: Snapshot,
        lifespan: Lifespan | None,
        kept_free: Mapping[int, float],
        group_kv_tokens: float = 0.0,
    ) -> None:
        """``kept_free``: version -> KV that its lanes keep free. ``group_kv_tokens``: of a new group; 0: not known."""
        self._snapshot, self._lifespan, self._kept_free = snapshot, lifespan, kept_free
        self._group_kv_tokens = group_kv_tokens
        requests = snapshot.requests
        self._context = (requests.prompt_tokens + requests.tokens).astype(np.float64)
        self._seats = plannable(snapshot)  # a column: to make one of a list takes longer than to use it
        self._unfinished = np.flatnonzero(requests.unfinished)
        self._held = self._context[self._unfinished]
        targets = snapshot.workers.target[self._seats].tolist()
        self.leader = leading(snapshot.newest, targets, snapshot.window, snapshot.admits)
        self.ample = False  # whether all versions have more DP groups than they can fill, as ``targets`` has found
        self._later: dict[float, Column] = {}  # tokens ahead -> KV that each unfinished request will hold by then

    def targets(self) -> dict[int, int]:
        """Seat -> version. Every version with unfinished requests keeps or gets at least one DP group.

        Where KV is ample an older version keeps what works for it. Elsewhere it keeps what its lifespan says, or what
        its KV needs where that is more or the version can admit no more; without a lifespan all that it has, until its
        last step.
        """
        snapshot = self._snapshot
        target = present_targets(snapshot, self.leader)
        if not self._dry():
            wanted = self._wanted({*target.values(), self.leader})
            need = self._needs(wanted, {})
            to_come = self._filled_by(snapshot.groups_per_step)
            self.ample = AMPLE * (sum(map(ceil, need.values())) + to_come) <= len(target)
            if self.ample:
                self._deal(target, need, self._spread(need, target))
            else:
                need = self._needs(wanted, self._kept_free)
                self._deal(target, need, self._scheduled(need, len(target)))
        cover(snapshot, target)
        return target

    def moves(self, targets: Mapping[int, int]) -> tuple[tuple[Move, ...], Lanes]:
        """Off the DP groups that change or leave, the longest first; to the lanes; then off those whose KV runs out."""
        stays = staying(self._snapshot, targets)
        board = _Board(self._snapshot, stays, plan_lanes(self._snapshot, stays, self._lifespan), self._shares())
        requests = self._snapshot.requests
        rows = np.flatnonzero(requests.movable & (requests.worker >= 0))
        rows = rows[~board.stays[requests.worker[rows]]]
        for row in rows[np.argsort(-requests.remaining_tokens(rows), kind="stable")].tolist():
            board.move(row)
        for row, seat in board.lanes.to_lane.items():
            if requests.movable[row] and board.stays[requests.worker[row]]:
                board.hurry(row, seat)
        for seat in board.pressed():
            board.relieve(seat)
        return tuple(board.moves), board.lanes

    def _spread(self, exact: Mapping[int, float], target: Mapping[int, int]) -> dict[int, int]:
        """Where KV is ample: older versions keep what works for them, the newest gets what it could fill."""
        need = {version: ceil(groups) for version, groups in exact.items()}
        if self._may_begin(self.leader):
            need[self.leader] += ceil(self._filled_by(self._snapshot.admissible[self.leader]))
        kept = self._in_use(need, target)
        return kept if sum(kept.values()) <= len(target) else _shared(need, len(target))

    def _scheduled(self, exact: Mapping[int, float], groups: int) -> dict[int, int]:
        """Where KV is short: what each version fills, and an older one what its lifespan says where that is more.

        No more than it could fill with all that it may begin: of many DP groups most of a due version's would be empty.
        """
        snapshot, lifespan, leader = self._snapshot, self._lifespan, self.leader
        need = {version: ceil(each) for version, each in exact.items()}
        if lifespan is not None:
            for version in need:
                if version < leader and need[version] and snapshot.admits(version):
                    could = exact[version] + self._filled_by(snapshot.admissible[version])
                    need[version] = max(need[version], ceil(min(could, int(lifespan.hosts(version, snapshot.now_s)))))
        return need if self._may_begin(leader) else _shared(need, groups)

    def _deal(self, target: dict[int, int], exact: Mapping[int, float], need: Mapping[int, int]) -> None:
        """Hands DP groups on until each version has as many as it needs, or none has one to give."""
        leader, lifespan = self.leader, self._lifespan
        have = dict.fromkeys(need, 0) | Counter(target.values())
        kv_expected = self._snapshot.workers.kv_expected.tolist()
        # KV and seat, the emptiest last, of versions that have given one up: they had too many, or are robbed as nobody
        # has; so they get none after
        emptiest: dict[int, list[tuple[int, int]]] = {}

        def give(source: int, to: int) -> None:
            if source not in emptiest:
                seats = [(kv_expected[seat], seat) for seat, its in target.items() if its == source]
                emptiest[source] = sorted(seats, reverse=True)
            target[emptiest[source].pop()[1]] = to
            have[source] -= 1
            have[to] += 1

        for version in sorted(need):
            if version < leader and (lifespan is not None or self._ends(version)):
                while have[version] > need[version]:  # at once to the one that would get it in the end
                    give(version, next((v for v in sorted(need) if have[v] < need[v]), leader))
        for version in sorted(need):  # the earliest deadline first
            while have[version] < need[version]:
                donors = [v for v in need if v != version and have[v] > need[v]]
                if donors:
                    give(max(donors), version)
                elif not have[version] and (donors := [v for v in need if have[v] > 1]):
                    give(min(donors, key=lambda v: (exact[v] - have[v], v)), version)
                else:
                    break

    def _wanted(self, versions: set[int]) -> dict[int, tuple[int, float]]:
        """Version -> its unfinished requests, and their KV: now or at the horizon, whichever is more. In order."""
        of_version = self._snapshot.requests.version[self._unfinished]
        first = int(of_version.min(initial=0))
        places, later = of_version - first, self._look_ahead(HORIZON_TOKENS, LEVEL_TOKENS)
        counts = np.bincount(places).tolist()
        kv = np.maximum(np.bincount(places, weights=self._held), np.bincount(places, weights=later)).tolist()
        found = {first + place: each for place, each in enumerate(zip(counts, kv, strict=True)) if each[0]}
        return {version: found.get(version, (0, 0.0)) for version in sorted(versions | found.keys())}

    def _needs(self, wanted: Mapping[int, tuple[int, float]], kept_free: Mapping[int, float]) -> dict[int, float]:
        """DP groups that each version needs for its requests and their KV; the leading one at least."""
        slots, kv_tokens = self._engine
        need: dict[int, float] = {}
        for version, (requests, kv) in wanted.items():
            least = 1 if requests or version == self.leader else 0
            kv += kept_free.get(version, 0.0)
            need[version] = max(least, kv / (FILL * kv_tokens), requests / slots)
        return need

    def _filled_by(self, groups: int) -> float:
        """DP groups whose KV so many groups to come would fill, all as long as they get; inf: not known yet.

        Slots do not count: where they are short, what has begun says so.
        """
        if not self._group_kv_tokens or not len(self._seats):
            return inf
        return groups * self._group_kv_tokens / (FILL * self._engine[1])

    @cached_property
    def _engine(self) -> tuple[float, float]:
        """Slots and KV of a DP group, on average."""
        workers = self._snapshot.workers
        if not len(self._seats):
            return 1.0, 1.0
        return float(workers.slots[self._seats].mean()), float(workers.kv_tokens[self._seats].mean())

    def _in_use(self, need: dict[int, int], target: Mapping[int, int]) -> dict[int, int]:
        """Older versions keep what works for them, too; not what still empties for them."""
        workers = self._snapshot.workers
        working = np.flatnonzero((workers.held > 0) & (workers.loaded == workers.target))
        works = Counter(map(target.get, working.tolist()))
        return {v: least if v == self.leader else max(least, works[v]) for v, least in need.items()}

    def _shares(self) -> Column:
        """By row: KV of a request now, and LEVEL_TOKENS later."""
        later = np.zeros(len(self._context))
        later[self._unfinished] = self._look_ahead(LEVEL_TOKENS)
        return np.stack([self._context, later])

    def _look_ahead(self, *ahead_tokens: float) -> Column:
        """KV that each unfinished request will hold so many tokens later, by the chance that it still runs.

        Of the first of ``ahead_tokens``; the others are made with it, as chances at several times share half their
        work, and are kept.
        """
        if ahead_tokens[0] not in self._later:
            rows = self._unfinished
            runs_on = self._snapshot.requests.runs_on(rows, np.array(ahead_tokens))
            for tokens, runs in zip(ahead_tokens, runs_on.T, strict=True):
                self._later[tokens] = (self._held + tokens) * runs
        return self._later[ahead_tokens[0]]

    def _dry(self) -> bool:
        """Whether the leading version has nothing and will get nothing: no prompt is left."""
        snapshot, requests = self._snapshot, self._snapshot.requests
        has = bool((requests.unfinished & (requests.version == self.leader)).any())
        return not has and not len(snapshot.backlog_longest) and not snapshot.admits(self.leader)

    def _may_begin(self, version: int) -> bool:
        """Whether a prompt waits that this version may still take."""
        snapshot = self._snapshot
        return len(snapshot.backlog_longest) > 0 and snapshot.admits(version)

    def _ends(self, version: int) -> bool:
        """Whether this version is in its last step, or can admit no more."""
        snapshot = self._snapshot
        due = version + snapshot.window - 1 <= snapshot.newest
        return due or not snapshot.admits(version)


def _shared(need: dict[int, int], groups: int) -> dict[int, int]:
    """What is left over of so many DP groups goes to all versions in proportion to what they need: all get faster."""
    total = sum(need.values())
    return {version: max(least, least * groups // total) for version, least in need.items()} if total else need


class _Board:
    """KV and requests of each DP group as they would be once the moves so far are done: now, and some tokens later."""

    def __init__(self, snapshot: Snapshot, stays: Column, lanes: Lanes, shares: Column) -> None:
        workers = self._workers = snapshot.workers
        requests = self._requests = snapshot.requests
        self.stays, self.lanes = stays, lanes
        self._shares = shares
        rows = np.flatnonzero(requests.unfinished & (requests.worker >= 0))
        ahead = np.bincount(requests.worker[rows], weights=self._shares[1][rows], minlength=len(workers.held))
        self._kv = np.stack([workers.kv_expected.astype(np.float64), ahead])
        self._held = workers.held.copy()
        self._peers: dict[int, Column] = {}  # version -> seats that stay with it
        # by seat: KV over what it is to hold, kept up to date, as every move asks for the least of many
        self._level = np.full(len(workers.held), np.inf)
        np.divide(FILL * self._kv.max(axis=0), self.lanes.cap, out=self._level, where=self.lanes.cap > 0)
        self.moves: list[Move] = []

    def peers(self, version: int) -> Column:
        """Seats that stay with this version."""
        if version not in self._peers:
            self._peers[version] = np.flatnonzero(self.stays & (self._workers.loaded == version))
        return self._peers[version]

    def move(self, row: int, level: float = FILL) -> bool:
        """To its lane, else the DP group of its version with the most free KV, as far as that fills it to ``level``."""
        source, peers = int(self._requests.worker[row]), self.peers(int(self._requests.version[row]))
        levels = np.where(self._held[peers] < self._workers.slots[peers], self._level[peers], np.inf)
        levels[peers == source] = np.inf
        place = int(levels.argmin()) if len(levels) else 0
        if not len(levels) or levels[place] == np.inf:
            return False
        lane = self.lanes.to_lane.get(row, -1)
        target = lane if lane >= 0 and self._held[lane] < self._workers.slots[lane] else int(peers[place])
        if self._held[target] and self._filled(row, target) * FILL > level * self.lanes.cap[target]:
            return False
        self._do(row, target)
        return True

    def hurry(self, row: int, lane: int) -> None:
        """To its lane, though that may have others to give away first."""
        room = FILL * self._workers.kv_tokens[lane] - self._filled(row, lane)
        if self._held[lane] < self._workers.slots[lane] and room >= 0:
            self._do(row, lane)

    def _filled(self, row: int, seat: int) -> float:
        """KV of a DP group with this request too."""
        return float((self._kv[:, seat] + self._shares[:, row]).max())

    def _do(self, row: int, target: int) -> None:
        source, share = int(self._requests.worker[row]), self._shares[:, row]
        self.moves.append(Move(row, target))
        self._kv[:, target] += share
        self._kv[:, source] -= share
        self._held[target] += 1
        self._held[source] -= 1
        for seat in (target, source):
            if self.lanes.cap[seat]:
                self._level[seat] = FILL * max(self._kv[:, seat].tolist()) / self.lanes.cap[seat]

    def pressed(self) -> list[int]:
        """Seats to be relieved, if others can."""
        stay = np.flatnonzero(self.stays)
        seats: list[int] = stay[self._level[stay] > PRESSED].tolist()
        return seats

    def relieve(self, seat: int) -> None:
        """Moves the largest requests without hurry off a pressed DP group, while others of its version are emptier.

        Never the last one: alone it would press any other as much, and be moved on for ever without a token.
        """
        peers = self.peers(int(self._workers.loaded[seat]))
        largest: list[int] | None = None
        while len(peers) > 1 and self._held[seat] > 1 and (level := float(self._level[seat])) > PRESSED:
            if level - float(self._level[peers].min()) < LEVEL_GAP:
                return
            if largest is None:
                movable = self._requests.movable & ~self.lanes.hurried
                rows = np.flatnonzero(movable & (self._requests.worker == seat))
                largest = rows[np.argsort(self._shares[0][rows], kind="stable")].tolist()
            if not largest or not self.move(largest.pop(), level):
                return
