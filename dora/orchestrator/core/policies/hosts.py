"""Which DP groups host which version: what the plans of several policies share."""

import numpy as np

from dora.orchestrator.core.snapshot import Snapshot
from dora.orchestrator.core.table import Column


def plannable(snapshot: Snapshot) -> list[int]:
    """Seats that a plan gives a version: living ones that are not to leave."""
    return [int(seat) for seat in np.flatnonzero(snapshot.workers.alive & ~snapshot.workers.draining)]


def waiting_versions(snapshot: Snapshot) -> list[int]:
    """Versions with requests that no worker holds, the oldest first."""
    requests = snapshot.requests
    return [int(version) for version in np.unique(requests.version[requests.unfinished & (requests.worker < 0)])]


def cover(snapshot: Snapshot, targets: dict[int, int]) -> None:
    """Gives each version that requests wait for a DP group of ``targets``, if it has none there.

    It takes one that has the weights, else the one with the least KV, and no version's last one that requests wait for.
    With too few of them the oldest versions go first: they have the earliest deadlines.
    """
    workers, waited = snapshot.workers, waiting_versions(snapshot)
    for place, version in enumerate(waited):
        if version in targets.values():
            continue
        keep = set(waited[:place])  # the last group of an older version is not taken from it
        hosted = list(targets.values())
        free = [seat for seat, target in targets.items() if target not in keep or hosted.count(target) > 1]
        if free:
            seat = min(free, key=lambda seat: (workers.loaded[seat] != version, workers.kv_expected[seat], seat))
            targets[seat] = version


def staying(snapshot: Snapshot, targets: dict[int, int]) -> Column:
    """By seat (bool): has its version in memory and is to keep it, so that requests may move to it."""
    workers = snapshot.workers
    target = workers.target.copy()
    for seat, version in targets.items():
        target[seat] = version
    stays: Column = workers.alive & ~workers.draining & (workers.loaded == target) & (workers.loaded >= 0)
    return stays


def present_targets(snapshot: Snapshot) -> dict[int, int]:
    """What each plannable seat is to host already; the newest version where that is none."""
    target = snapshot.workers.target
    return {seat: int(target[seat]) if target[seat] >= 0 else snapshot.newest for seat in plannable(snapshot)}
