"""Assigns workers to versions by the KV that their requests hold and will hold."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, inf

import numpy as np

from dora.core.plan import Move
from dora.core.policies.board import context_tokens, staying
from dora.core.policies.laxity.moves import LevelBoard
from dora.core.policies.laxity.reserved import ReservedWorkers, reserve
from dora.core.policies.laxity.schedule import Schedule, leading
from dora.core.policies.laxity.tuning import TUNING
from dora.core.policies.targets import cover, plannable, present_targets
from dora.core.table import Column
from dora.core.view import View


@dataclass(slots=True)
class Last:
    """Results of the last plans that the next one uses."""

    kept_free: Mapping[int, float] = field(default_factory=dict)  # version -> KV that its reserved workers keep free
    group_kv_tokens: float = 0.0  # KV of a new group at its end; 0: unknown
    ample: bool = False  # all versions have more workers than they can fill


class Allocation:
    """The supply of workers and the demand of versions in one view."""

    def __init__(self, view: View, schedule: Schedule | None, last: Last) -> None:
        self._view, self._schedule, self._last = view, schedule, last
        indexes, workers = plannable(view), view.workers
        self._slots = float(workers.slots[indexes].mean()) if len(indexes) else 1.0  # average of a worker
        self._kv_tokens = (
            TUNING.fill * float(workers.kv_tokens[indexes].mean()) if len(indexes) else 0.0
        )  # KV that an average worker may hold
        self._unfinished = np.flatnonzero(view.requests.unfinished)
        self._held = context_tokens(view.requests)[self._unfinished].astype(np.float64)
        self.leader = leading(view.newest, workers.target[indexes].tolist(), view.window, view.admits)
        self.ample = last.ample  # as computed by ``targets``
        self._later: dict[float, Column] = {}  # tokens ahead -> KV that each unfinished request will hold by then

    def targets(self) -> dict[int, int]:
        """The planned version of each worker. Every version with unfinished requests has at least one worker.

        Without a schedule an older version keeps all its workers until its last step.
        """
        view = self._view
        target = present_targets(view, self.leader)
        if not self._starved():
            demand = self._demand({*target.values(), self.leader})
            need = self._needs(demand, {})
            to_come = self._filled_by(view.groups_per_step)
            filled = sum(map(ceil, need.values())) + to_come
            self.ample = (TUNING.still_ample if self.ample else TUNING.ample) * filled <= len(target)
            if self.ample:
                self._deal(target, need, self._spread(need, target))
            else:
                need = self._needs(demand, self._last.kept_free)
                self._deal(target, need, self._scheduled(need, len(target)))
        cover(view, target)
        return target

    def moves(self, targets: Mapping[int, int]) -> tuple[tuple[Move, ...], ReservedWorkers]:
        """The moves for these targets, and the reserved workers among those that keep their version."""
        view, schedule = self._view, self._schedule
        reserved = ReservedWorkers.none(view)
        if schedule is not None and (schedule.hurried or len(np.unique(view.workers.step_scale)) > 1):
            stays = staying(view, targets)
            reserved = reserve(view, stays, schedule.end_s, schedule.reserved_fill)
        later = np.zeros(len(view.requests.tokens))
        later[self._unfinished] = self._look_ahead(TUNING.level_tokens)
        board = LevelBoard(view, targets, reserved, later)
        board.plan()
        return board.moves(), reserved

    def _spread(self, exact: Mapping[int, float], target: Mapping[int, int]) -> dict[int, int]:
        """Worker counts if KV is ample: older versions keep their busy workers, the newest gets all it can fill."""
        view, workers = self._view, self._view.workers
        need = {version: ceil(each) for version, each in exact.items()}
        if self._may_begin(self.leader):
            need[self.leader] += ceil(TUNING.new_share * self._filled_by(view.admissible[self.leader]))
        # excludes workers that empty for it
        working = np.flatnonzero((workers.assigned > 0) & (workers.loaded == workers.target))
        works = Counter(map(target.get, working.tolist()))
        kept = {v: least if v == self.leader else max(least, works[v]) for v, least in need.items()}
        return kept if sum(kept.values()) <= len(target) else _shared(need, len(target))

    def _scheduled(self, exact: Mapping[int, float], workers: int) -> dict[int, int]:
        """Worker counts if KV is short: as many as each version fills. An older version gets its scheduled share, if it
        can fill that.
        """
        view, schedule, leader = self._view, self._schedule, self.leader
        need = {version: ceil(each) for version, each in exact.items()}
        if schedule is not None:
            for version in need:
                if version < leader and need[version] and view.admits(version):
                    could = exact[version] + self._filled_by(view.admissible[version])
                    need[version] = max(need[version], ceil(min(could, int(schedule.share(version, view.now_s)))))
        return need if self._may_begin(leader) else _shared(need, workers)

    def _deal(self, target: dict[int, int], exact: Mapping[int, float], need: Mapping[int, int]) -> None:
        """Reassigns workers until each version has as many as it needs or no version can give one."""
        leader, have = self.leader, dict.fromkeys(need, 0) | Counter(target.values())
        kv_expected = self._view.workers.kv_expected.tolist()
        # by version that has given a worker: (KV, index) of its workers, the emptiest last. Such a version had too
        # many, or gave one to a version without any, so it gets none afterwards
        emptiest: dict[int, list[tuple[int, int]]] = {}

        def give(source: int, to: int) -> None:
            if source not in emptiest:
                indexes = [(kv_expected[index], index) for index, its in target.items() if its == source]
                emptiest[source] = sorted(indexes, reverse=True)
            target[emptiest[source].pop()[1]] = to
            have[source] -= 1
            have[to] += 1

        for version in sorted(need):
            if version < leader and (self._schedule is not None or self._ends(version)):
                while have[version] > need[version]:  # directly to the version that will need it
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

    def _demand(self, versions: set[int]) -> dict[int, tuple[int, float]]:
        """By version, in order: its unfinished requests and their KV, now or at the horizon, whichever is more."""
        of_version = self._view.requests.version[self._unfinished]
        first = int(of_version.min(initial=0))
        indexes, later = of_version - first, self._look_ahead(TUNING.horizon_tokens, TUNING.level_tokens)
        counts = np.bincount(indexes).tolist()
        kv = np.maximum(np.bincount(indexes, weights=self._held), np.bincount(indexes, weights=later)).tolist()
        found = {first + place: each for place, each in enumerate(zip(counts, kv, strict=True)) if each[0]}
        return {version: found.get(version, (0, 0.0)) for version in sorted(versions | found.keys())}

    def _needs(self, demand: Mapping[int, tuple[int, float]], kept_free: Mapping[int, float]) -> dict[int, float]:
        """Workers that each version needs for its requests and their KV. The leading version needs at least one."""
        need: dict[int, float] = {}
        for version, (requests, kv) in demand.items():
            least = 1 if requests or version == self.leader else 0
            kv += kept_free.get(version, 0.0)
            need[version] = max(least, kv / (self._kv_tokens or 1.0), requests / self._slots)
        return need

    def _filled_by(self, groups: int) -> float:
        """Workers whose KV this many new groups would fill at full length, or inf if unknown."""
        kv_tokens = self._last.group_kv_tokens
        return groups * kv_tokens / self._kv_tokens if kv_tokens and self._kv_tokens else inf

    def _look_ahead(self, *ahead_tokens: float) -> Column:
        """Expected KV of each unfinished request after the first of ``ahead_tokens``: KV times the chance that it runs.

        The results for the other values share half the work. They are computed together and cached.
        """
        if ahead_tokens[0] not in self._later:
            runs_on = self._view.requests.runs_on(self._unfinished, np.array(ahead_tokens))
            for tokens, runs in zip(ahead_tokens, runs_on.T, strict=True):
                self._later[tokens] = (self._held + tokens) * runs
        return self._later[ahead_tokens[0]]

    def _starved(self) -> bool:
        """Returns whether the leading version has no requests and can get none, because no prompt is left."""
        view, requests = self._view, self._view.requests
        has = bool((requests.unfinished & (requests.version == self.leader)).any())
        return not has and not len(view.backlog_longest) and not view.admits(self.leader)

    def _may_begin(self, version: int) -> bool:
        return len(self._view.backlog_longest) > 0 and self._view.admits(version)

    def _ends(self, version: int) -> bool:
        view = self._view
        return version + view.window - 1 <= view.newest or not view.admits(version)


def _shared(need: dict[int, int], workers: int) -> dict[int, int]:
    total = sum(need.values())
    return {version: max(least, least * workers // total) for version, least in need.items()} if total else need
