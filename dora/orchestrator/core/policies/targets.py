"""Which worker is to host which version: what the plans of several strategies share."""

import numpy as np

from dora.orchestrator.core.snapshot import Snapshot
from dora.orchestrator.core.table import Column


def plannable(snapshot: Snapshot) -> Column:
    """Seats that a plan gives a version: living ones that are not to leave."""
    return np.flatnonzero(snapshot.workers.alive & ~snapshot.workers.draining)


def waiting_versions(snapshot: Snapshot) -> list[int]:
    """Versions with requests that no worker holds, the oldest first."""
    requests = snapshot.requests
    return [int(version) for version in np.unique(requests.version[requests.unfinished & (requests.worker < 0)])]


def cover(snapshot: Snapshot, targets: dict[int, int]) -> None:
    """Gives each version that requests wait for a worker of ``targets``, if it has none there.

    It takes one that has the weights, else the one with the least KV, and no version's last one that requests wait for.
    With too few of them the oldest versions go first: they have the earliest deadlines.
    """
    workers, waited = snapshot.workers, waiting_versions(snapshot)
    for place, version in enumerate(waited):
        if version in targets.values():
            continue
        keep = set(waited[:place])  # the last worker of an older version is not taken from it
        hosted = list(targets.values())
        free = [seat for seat, target in targets.items() if target not in keep or hosted.count(target) > 1]
        if free:
            seat = min(free, key=lambda seat: (workers.loaded[seat] != version, workers.kv_expected[seat], seat))
            targets[seat] = version


def present_targets(snapshot: Snapshot, otherwise: int) -> dict[int, int]:
    """What each plannable seat is to host already; ``otherwise`` where that is no version."""
    seats = plannable(snapshot)
    target = snapshot.workers.target[seats]
    return dict(zip(seats.tolist(), np.where(target >= 0, target, otherwise).tolist(), strict=True))


def living_targets(snapshot: Snapshot) -> dict[int, int]:
    """The version that each living seat is to host now."""
    seats = np.flatnonzero(snapshot.workers.alive)
    return dict(zip(seats.tolist(), snapshot.workers.target[seats].tolist(), strict=True))
