"""Which worker is to host which version: what the plans of several strategies share."""

import numpy as np

from dora.core.table import Column
from dora.core.view import View


def plannable(view: View) -> Column:
    """Indexes that a plan gives a version: living ones that are not to leave."""
    return np.flatnonzero(view.workers.alive & ~view.workers.draining)


def waiting_versions(view: View) -> list[int]:
    """Versions with requests that no worker holds, the oldest first."""
    requests = view.requests
    return [int(version) for version in np.unique(requests.version[requests.unfinished & (requests.worker < 0)])]


def cover(view: View, targets: dict[int, int]) -> None:
    """Gives each version that requests wait for a worker of ``targets``, if it has none there.

    It takes one that has the weights, else the one with the least KV, and no version's last one that requests wait for.
    With too few of them the oldest versions go first: they have the earliest deadlines.
    """
    workers, waited = view.workers, waiting_versions(view)
    for place, version in enumerate(waited):
        if version in targets.values():
            continue
        keep = set(waited[:place])  # the last worker of an older version is not taken from it
        hosted = list(targets.values())
        free = [index for index, target in targets.items() if target not in keep or hosted.count(target) > 1]
        if free:
            index = min(free, key=lambda index: (workers.loaded[index] != version, workers.kv_expected[index], index))
            targets[index] = version


def present_targets(view: View, otherwise: int) -> dict[int, int]:
    """What each plannable index is to host already; ``otherwise`` where that is no version."""
    indexes = plannable(view)
    target = view.workers.target[indexes]
    return dict(zip(indexes.tolist(), np.where(target >= 0, target, otherwise).tolist(), strict=True))


def living_targets(view: View) -> dict[int, int]:
    """The version that each living index is to host now."""
    indexes = np.flatnonzero(view.workers.alive)
    return dict(zip(indexes.tolist(), view.workers.target[indexes].tolist(), strict=True))
