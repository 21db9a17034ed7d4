"""What one scrape of the service reads: the runtime at one moment, and figures that several metrics share."""

import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Final

from dora.config import Config
from dora.core.fleet.worker import Worker
from dora.core.handoff.table import REASONS
from dora.core.state import State
from dora.data.mismatch import mismatches
from dora.metrics.declaration import Labelled
from dora.orchestrator.metrics.requests import ages, requests_by_state
from dora.orchestrator.recording.storage import PERSISTED, RECORD, RUN_FOLDER, STATE
from dora.orchestrator.rollout.distributions import KINDS
from dora.orchestrator.rollout.telemetry import RESULTS, Moved, StepRecord
from dora.orchestrator.runtime import Runtime
from dora.orchestrator.services import status
from dora.system.awake import awake_s

PLACES: Final = (RUN_FOLDER, RECORD, STATE, PERSISTED)
WORKER_STATES: Final = ("starting", "joining", "loading", "ready", "vacating", "draining", "lost", "drained")
VERSION_STATES: Final = ("published", "suspect", "rejected", "unavailable")
HOST_STATES: Final = ("ready", "draining", "drained", "failed", "lost", "expected")
POOL_STATES: Final = ("joining", "ready", "lost", "drained")


class ServiceReadings:
    """Describes a service at one moment, on the event loop. ``free`` comes from ``free_bytes``."""

    def __init__(self, runtime: Runtime, free: Mapping[str, float]) -> None:
        self.runtime = runtime
        self.state: State = runtime.core.state
        self.window = self.state.window
        self.free = free
        self.now_s = awake_s()
        self.at = time.time()

    @cached_property
    def counters(self) -> Mapping[str, float]:
        return self.runtime.status.counters()

    @cached_property
    def requests(self) -> Labelled:
        return requests_by_state(self.state)

    @property
    def workers(self) -> Iterable[Worker]:
        return self.state.workers.values()

    @property
    def _last_step(self) -> StepRecord | None:
        steps = self.runtime.telemetry.steps
        return steps[-1] if steps else None

    def of_step(self, name: str) -> float | None:
        """Returns a field of the last step, or None before the first."""
        return None if self._last_step is None else getattr(self._last_step, name)

    def signals(self) -> Labelled:
        found = {} if self._last_step is None else self._last_step.metrics
        return {(name,): value for name, value in found.items()}

    def mismatch(self, name: str) -> float | None:
        """Returns a field of the last step's mismatch, of its lowest staleness, or None if its trainer told none."""
        step = self._last_step
        found = mismatches(step.step, step.metrics) if step is not None else ()
        return getattr(found[0], name) if found else None

    def worker_states(self) -> Labelled:
        found = Counter(map(status.worker_state, self.workers))
        found.update(state for _, state, _ in self.runtime.status.gone_workers())
        return all_of(WORKER_STATES, found)

    def version_states(self) -> Labelled:
        live = range(self.window.oldest_live, self.window.newest + 1)
        return all_of(VERSION_STATES, Counter(status.version_state(self.state, version) for version in live))

    def host_states(self) -> Labelled:
        return all_of(HOST_STATES, Counter(self.runtime.hosts.states()))

    def pool_states(self) -> Labelled:
        found = Counter("ready" if name in self.state.pools else "joining" for name in self.runtime.sessions.pools)
        found["lost"] = len(self.runtime.sessions.lost_pools)
        return all_of(POOL_STATES, found)

    def workers_by_age(self) -> Labelled:
        """Returns the workers that serve each version, and those that load it."""
        newest, found = self.window.newest, Counter[tuple[str, str]]()
        for worker in self.workers:
            if worker.hosts >= 0:
                found[str(newest - worker.hosts), "serving"] += 1
            elif worker.loading >= 0:
                found[str(newest - worker.loading), "loading"] += 1
        shown = [(str(age), state) for age in ages(self.window) for state in ("serving", "loading")]
        return {labels: float(found[labels]) for labels in shown}

    def groups_by_age(self) -> Labelled:
        """Returns the finished and the other open groups of each version."""
        return {
            (str(age), state): float(count)
            for age in ages(self.window)
            for state, count in zip(
                ("open", "finished"), status.groups_of(self.state, self.window.newest - age), strict=True
            )
        }

    def tokens_by_age(self) -> Labelled:
        found = self.runtime.telemetry.tokens_by_age
        return {(age,): float(found[age]) for age in {*map(str, ages(self.window)), *found}}

    def moves(self) -> Labelled:
        found = self.runtime.telemetry.moves
        return {labels: float(found[labels]) for labels in map(Moved._make, product(KINDS, REASONS, RESULTS))}

    def pool_bytes(self, name: str) -> float:
        """Returns the sum over all pools of a field of their reports, or of their capability."""
        pools = self.runtime.sessions.pools.values()
        return float(sum(getattr(pool.report, name, 0) or 0 for pool in pools))

    def clock_ahead_s(self) -> float:
        """Returns the largest difference between a worker's clock and the service's, with its sign."""
        sessions = self.runtime.sessions.workers.values()
        return max((session.clock_ahead_s for session in sessions), key=abs, default=0.0)

    def faults(self) -> Labelled:
        faults = self.runtime.storage.faults
        return {(place,): float(place in faults) for place in PLACES}


def all_of(names: Iterable[str], found: Mapping[str, int]) -> Labelled:
    """Returns the counts of all names, zeros included, with those that were found besides."""
    return {(name,): float(found.get(name, 0)) for name in {*names, *found}}


def storage_folders(config: Config, run_folder: Path) -> Mapping[str, Path]:
    """Returns the folders of the storage places that the service has."""
    folders = {RUN_FOLDER: str(run_folder), RECORD: config.record, STATE: config.service.state}
    return {place: Path(folder) for place, folder in folders.items() if folder}


def free_bytes(folders: Mapping[str, Path]) -> Mapping[str, float]:
    """Returns the free bytes of each place that can be read. A file system may hang: call it in a thread."""
    found = {}
    for place, folder in folders.items():
        try:
            room = os.statvfs(folder)
        except OSError:
            continue
        found[place] = float(room.f_bavail * room.f_frsize)
    return found
