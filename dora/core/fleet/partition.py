"""The number of workers for each version, and their choice (DORA, section 4.3)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil


def proportional(work: Mapping[int, float], groups: int, newest: int) -> dict[int, int]:
    """Workers per version, proportional to its remaining work in tokens, by largest remainders.

    Every version with work gets at least one. If there are fewer workers than such versions, the earliest deadline (the
    oldest version) goes first. Surplus workers go to ``newest``. The counts sum to ``groups``.
    """
    counts = dict.fromkeys(sorted({*work, newest}), 0)
    needy = [version for version in sorted(work) if work[version] > 0]
    for version in needy[:groups]:
        counts[version] = 1
    spare = groups - sum(counts.values())
    total = sum(work[version] for version in needy)
    if spare and total > 0:
        # The share above the guaranteed worker. A version with a share below one already has more than its share.
        extra = {version: max(0.0, work[version] / total * groups - 1) for version in needy}
        scale = spare / sum(extra.values()) if sum(extra.values()) > 0 else 0.0
        quota = {version: extra[version] * scale for version in needy}
        for version in needy:
            counts[version] += int(quota[version])
        remainders = sorted(needy, key=lambda version: (int(quota[version]) - quota[version], -version))
        for version in remainders[: groups - sum(counts.values())]:
            counts[version] += 1
    counts[newest] += groups - sum(counts.values())
    return {version: count for version, count in counts.items() if count}


def keeping_full(
    shares: Mapping[int, int], present: Mapping[int, int], full: Mapping[int, float], newest: int
) -> dict[int, int]:
    """The counts of ``shares``, except that an older version keeps every worker that its KV still fills.

    Otherwise its requests would find no room on its other workers and would finish in place, on workers that their new
    version waits for. ``present`` has the workers that hold each version now, and ``full`` those that its KV fills. One
    worker for each version with a share goes before that, and earlier deadlines go before later ones. ``newest`` gets
    the remaining workers, possibly none: the others shrink as their responses end. The sum of counts is unchanged.
    """
    versions = sorted({*shares, *present} - {newest})
    least = {version: min(1, shares.get(version, 0)) for version in versions}
    kept = {version: min(present.get(version, 0), ceil(full.get(version, 0.0))) for version in versions}
    counts = dict.fromkeys(versions, 0)
    left = sum(shares.values())
    for goal in (least, kept, shares):
        for version in versions:
            more = min(left, max(0, goal.get(version, 0) - counts[version]))
            counts[version] += more
            left -= more
    counts[newest] = left
    return {version: count for version, count in counts.items() if count}


def settled(counts: Mapping[int, int], work: Mapping[int, float], goal: Mapping[int, int], hysteresis: float) -> bool:
    """Returns whether the present ``counts`` are close enough to the proportional share to be kept.

    They are not if a version that should have a worker has none (or the reverse), or if some version's count differs
    from its share by more than rounding (half a worker) plus ``hysteresis`` of a worker.
    """
    total, groups = sum(work.values()), sum(counts.values())
    if counts == goal:
        return True
    for version in {*counts, *goal}:
        have, share = counts.get(version, 0), work.get(version, 0.0) / total * groups if total else 0.0
        if (have == 0) != (goal.get(version, 0) == 0) or abs(have - share) > 0.5 + hysteresis:
            return False
    return True


@dataclass(frozen=True, slots=True)
class WorkerCandidate:
    worker: int
    loaded: int  # the version in its memory; -1: none
    target: int  # the version it is to host; -1: none
    kv_tokens: int  # live KV that would have to move if it changed version
    capacity: float = 1.0  # its speed, of any unit


def assign(candidates: Sequence[WorkerCandidate], counts: Mapping[int, int]) -> dict[int, int]:
    """Assigns versions to workers so that the least KV moves. Returns worker -> version.

    A worker keeps its version if possible. Workers that have theirs in memory keep it first, the fullest first, so the
    emptiest change. ``counts`` sum to the number of candidates. If these differ in capacity, a version gets as much as
    so many mean workers have, up to half a worker, and at least one.
    """
    vacancies = {version: float(count) for version, count in counts.items() if count}
    mean = sum(candidate.capacity for candidate in candidates) / max(1, len(candidates))
    chosen: dict[int, int] = {}
    fullest_first = sorted(candidates, key=lambda c: (-c.kv_tokens, c.target != c.loaded, c.worker))
    for keeps in ("loaded", "target"):
        for candidate in fullest_first:
            version = getattr(candidate, keeps)
            share = candidate.capacity / mean
            if candidate.worker not in chosen and vacancies.get(version, 0.0) > share / 2:
                chosen[candidate.worker] = version
                vacancies[version] -= share
    rest = [candidate for candidate in candidates if candidate.worker not in chosen]
    # the emptiest workers go to the oldest version that lacks one, as it has the earliest deadline
    for candidate in sorted(rest, key=lambda c: (c.kv_tokens, c.worker)):
        share = candidate.capacity / mean
        lacking = (version for version in sorted(vacancies) if vacancies[version] > share / 2)
        version = next(lacking, None)
        if version is None:
            version = max(vacancies, key=lambda version: (vacancies[version], -version))
        chosen[candidate.worker] = version
        vacancies[version] -= share
    _cover(candidates, sorted(vacancies), chosen)
    return chosen


def _cover(candidates: Sequence[WorkerCandidate], versions: Sequence[int], chosen: dict[int, int]) -> None:
    """Gives each version without a worker the emptiest one of the version that has most."""
    for version in versions:
        have = Counter(chosen.values())
        if not have[version]:
            donor = max(have, key=lambda each: (have[each], -each))
            emptiest = min((c.kv_tokens, c.worker) for c in candidates if chosen[c.worker] == donor)
            chosen[emptiest[1]] = version
