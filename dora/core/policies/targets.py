"""Functions that assign versions to workers, shared by several strategies."""

import numpy as np

from dora.core.table import Column
from dora.core.view import View


def plannable(view: View) -> Column:
    """Indexes that a plan assigns: alive and not leaving."""
    return np.flatnonzero(view.workers.alive & ~view.workers.draining)


def waiting_versions(view: View) -> list[int]:
    requests = view.requests
    return [int(version) for version in np.unique(requests.version[requests.unfinished & (requests.worker < 0)])]


def cover(view: View, targets: dict[int, int]) -> None:
    """Gives one of the workers in ``targets`` to each version that requests wait for and that has none.

    It prefers a worker that has the weights, then the one with the least KV. It never takes a version's last worker
    while requests wait for that version. If workers are too few, the oldest versions go first, with the earliest
    deadlines.
    """
    workers, waited = view.workers, waiting_versions(view)
    for place, version in enumerate(waited):
        if version in targets.values():
            continue
        keep = set(waited[:place])  # an older version keeps its last worker
        hosted = list(targets.values())
        free = [index for index, target in targets.items() if target not in keep or hosted.count(target) > 1]
        if free:
            index = min(free, key=lambda index: (workers.loaded[index] != version, workers.kv_expected[index], index))
            targets[index] = version


def present_targets(view: View, otherwise: int) -> dict[int, int]:
    """The present target of each plannable index; ``otherwise`` if it has none."""
    indexes = plannable(view)
    target = view.workers.target[indexes]
    return dict(zip(indexes.tolist(), np.where(target >= 0, target, otherwise).tolist(), strict=True))


def living_targets(view: View) -> dict[int, int]:
    indexes = np.flatnonzero(view.workers.alive)
    return dict(zip(indexes.tolist(), view.workers.target[indexes].tolist(), strict=True))
