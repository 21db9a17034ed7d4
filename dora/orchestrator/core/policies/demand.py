"""DP groups by the KV that versions need: who gives up, who gets, which requests move for it."""

from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from math import ceil, inf

import numpy as np

from dora.orchestrator.core.policies.board import staying
from dora.orchestrator.core.policies.lanes import Lanes, plan_lanes
from dora.orchestrator.core.policies.lifespan import Lifespan
from dora.orchestrator.core.policies.moves_tmp import Board
from dora.orchestrator.core.policies.outlook import FILL
from dora.orchestrator.core.policies.stride import leading
from dora.orchestrator.core.policies.targets import cover, plannable, present_targets
from dora.orchestrator.core.snapshot import Move, Snapshot
from dora.orchestrator.core.table import Column

HORIZON_TOKENS = 1_500.0  # a version needs room for what its requests will have grown to by then
LEVEL_TOKENS = 600.0  # DP groups are levelled by the KV they will hold after so many tokens, where that is more
AMPLE = 2.0  # times the KV that all that has begun and a step to come, at full length, can fill: none is packed tight
STILL_AMPLE = 1.4  # times that from then on: right after a publish a step counts twice, as begun and as to come
AT_ONCE = 0.25  # of what new groups fill at full length, where KV is ample: they begin together, and end one by one


class Demand:
    """One snapshot's supply and demand."""

    def __init__(
        self,
        snapshot: Snapshot,
        lifespan: Lifespan | None,
        kept_free: Mapping[int, float],
        group_kv_tokens: float = 0.0,
        ample: bool = False,
    ) -> None:
        """``kept_free``: version -> KV that its lanes keep free. ``group_kv_tokens``: of a new group; 0: not known.

        ``ample``: whether KV was so as last planned.
        """
        self._snapshot, self._lifespan, self._kept_free = snapshot, lifespan, kept_free
        self._group_kv_tokens = group_kv_tokens
        requests = snapshot.requests
        self._context = (requests.prompt_tokens + requests.tokens).astype(np.float64)
        self._seats = plannable(snapshot)  # a column: to make one of a list takes longer than to use it
        self._unfinished = np.flatnonzero(requests.unfinished)
        self._held = self._context[self._unfinished]
        targets = snapshot.workers.target[self._seats].tolist()
        self.leader = leading(snapshot.newest, targets, snapshot.window, snapshot.admits)
        self.ample = ample  # whether all versions have more DP groups than they can fill, as ``targets`` has found
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
            filled = sum(map(ceil, need.values())) + to_come
            self.ample = (STILL_AMPLE if self.ample else AMPLE) * filled <= len(target)
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
        lanes = plan_lanes(self._snapshot, stays, self._lifespan, self._roomy)
        board = Board(self._snapshot, stays, lanes, self._shares(), self._evened())
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
        """Where KV is ample: older versions keep what works for them, the newest gets what it could fill.

        Where there are not as many, each in proportion to what it needs.
        """
        need = {version: ceil(groups) for version, groups in exact.items()}
        if self._may_begin(self.leader):
            need[self.leader] += ceil(AT_ONCE * self._filled_by(self._snapshot.admissible[self.leader]))
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

    def _evened(self) -> int:
        """The newest version whose DP groups are levelled though none is pressed; -1: none.

        Where nobody else wants them the due one, as the step waits for its responses.
        """
        return self._lifespan.newest_due if self._lifespan is not None and self._roomy else -1

    @property
    def _roomy(self) -> bool:
        """Whether no version is packed tight for the sake of what is to begin: there is room, or nothing to begin."""
        return self.ample or not self._may_begin(self.leader)

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
