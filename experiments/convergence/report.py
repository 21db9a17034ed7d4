"""Everything that is said of the runs, as numbers: ``report.json``. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

from experiments.convergence.intervals import Estimate, end_mean, estimate, first_at, ratio, running_mean
from experiments.convergence.plan import Result, rewards_of
from experiments.convergence.rows import BASE, SYNC, WINDOWS_WITH_A_BAR, Row

SMOOTHED_STEPS: Final = 5  # a curve reaches a level when the mean of so many steps does
LEVEL_SHARE: Final = 0.9  # of sync's reward at the end
SOONER_BAR: Final = 1.5
SETTLED_FROM: Final = 5  # steps before it are left out of a step's time: what was begun before the first one is in them

Seeds = Mapping[int, Result]  # of one row


@dataclass(frozen=True, slots=True)
class Runs:
    """All results of one set of runs, by row and seed, and the simulator's step times of the rows, in minutes."""

    results: Mapping[str, Seeds]
    fleet_min: Mapping[str, float]

    @property
    def sync(self) -> Seeds:
        return self.results.get(SYNC, {})

    @property
    def level(self) -> float | None:
        """The reward whose time is compared; None without sync."""
        ends = [end_reward(result) for result in self.sync.values()]
        return LEVEL_SHARE * fmean(ends) if ends else None


def end_reward(result: Result) -> float:
    return end_mean(list(rewards_of(result)))


def mean_reward(result: Result) -> float:
    return fmean(rewards_of(result))


def policy_reward(result: Result) -> float:
    """Returns the mean reward of every response that a version of the last quarter sampled."""
    versions = result["versions"]
    last = versions[-1]["version"]
    late = [each for each in versions if each["version"] >= last * 3 / 4]
    return sum((each["reward"] or 0.0) * each["trajectories"] for each in late) / sum(
        each["trajectories"] for each in late
    )


def step_curve(result: Result) -> list[float]:
    """The smoothed reward of each step."""
    return running_mean(list(rewards_of(result)), SMOOTHED_STEPS)


def version_curve(result: Result) -> tuple[list[int], list[float]]:
    """The smoothed reward of each version that sampled anything, and the versions: how good the policy was by then."""
    versions = result["versions"]
    weights = [float(each["trajectories"]) for each in versions]
    rewards = [each["reward"] or 0.0 for each in versions]
    return [each["version"] for each in versions], running_mean(rewards, SMOOTHED_STEPS, weights)


def committed_s(result: Result) -> list[float]:
    """Returns the time of each step's commit since the first one: the start of the processes is left out."""
    return [step["committed_s"] for step in result["steps"]]


def step_seconds(result: Result) -> float:
    """The mean time of a step, once what was begun before the first one is used up."""
    times_s = committed_s(result)
    first = min(SETTLED_FROM, len(times_s) - 2) if len(times_s) > 1 else 0
    return (times_s[-1] - times_s[first]) / max(1, len(times_s) - 1 - first)


def steps_to(result: Result, level: float) -> int | None:
    """Steps that were trained until the reward of what they trained on was ``level``."""
    index = first_at(step_curve(result), level)
    return None if index is None else index + 1


def versions_to(result: Result, level: float) -> int | None:
    """Steps that were trained until the policy was as good as ``level``."""
    versions, rewards = version_curve(result)
    index = first_at(rewards, level)
    return None if index is None else versions[index]


def seconds_to(result: Result, level: float) -> float | None:
    steps = steps_to(result, level)
    return None if steps is None else committed_s(result)[steps - 1]


def policy_seconds_to(result: Result, level: float) -> float | None:
    """Until that policy was published."""
    versions = versions_to(result, level)
    return None if versions is None else committed_s(result)[versions - 1] if versions else 0.0


def built(
    runs: Runs, rows: Sequence[Row], limits: Sequence[Row], sweep: Sequence[Result], setup: Mapping[str, Any]
) -> dict[str, Any]:
    """The report of all results that there are. Rows without any are left out."""
    level = runs.level
    there = [row for row in rows if runs.results.get(row.name) or (row.reward_of and row.name in runs.fleet_min)]
    modes = {row.name: _of_row(row, runs, level) for row in there}
    return {
        "setup": {**setup, "level": level},
        "rates": _of_sweep(sweep),
        "modes": modes,
        "limits": {row.name: _of_row(row, runs, level) for row in limits if runs.results.get(row.name)},
        "base_of_limits": BASE,
        "staleness": {row.name: _staleness(runs.results[row.name]) for row in there if not row.reward_of},
        "bars": {name: _bars(modes[name]) for name in WINDOWS_WITH_A_BAR if name in modes},
        "failures": [
            f"{row} seed {seed}: {failure}"
            for row, seeds in runs.results.items()
            for seed, result in seeds.items()
            for failure in result["failures"]
        ],
    }


def _of_row(row: Row, runs: Runs, level: float | None) -> dict[str, Any]:
    own, base = runs.results.get(row.name, {}), runs.sync
    pairs = [(own[seed], base[seed]) for seed in sorted(own.keys() & base.keys())]
    fleet_min, sync_min = runs.fleet_min.get(row.name), runs.fleet_min.get(SYNC)
    faster_fleet = sync_min / fleet_min if sync_min and fleet_min else None
    found: dict[str, Any] = {
        "title": row.title,
        "seeds": len(own),
        "end_reward": estimate([end_reward(each) for each in own.values()]),
        "mean_reward": estimate([mean_reward(each) for each in own.values()]),
        "policy_reward": estimate([policy_reward(each) for each in own.values()]),
        "end_difference": estimate([end_reward(a) - end_reward(b) for a, b in pairs]),
        "mean_difference": estimate([mean_reward(a) - mean_reward(b) for a, b in pairs]),
        "policy_difference": estimate([policy_reward(a) - policy_reward(b) for a, b in pairs]),
        "staleness_mean": estimate([fmean(step["staleness_mean"] for step in each["steps"]) for each in own.values()]),
        "waited_share": estimate([waited_share(each) for each in own.values()]),
        "step_s": estimate([step_seconds(each) for each in own.values()]),
        "faster_measured": ratio([step_seconds(b) for _, b in pairs], [step_seconds(a) for a, _ in pairs]),
        "fleet_step_min": fleet_min,
        "faster_fleet": faster_fleet,
    }
    if level is not None:
        found |= _to_level(own, pairs, level, faster_fleet)
    if row.reward_of:  # the same rewards at each step: only the clock differs
        found["sooner_fleet"] = found["sooner_fleet_policy"] = faster_fleet and Estimate(faster_fleet, None, 0)
    return found


def _to_level(
    own: Seeds, pairs: Sequence[tuple[Result, Result]], level: float, faster_fleet: float | None
) -> dict[str, Any]:
    """Steps and time to ``level``. A ratio is over the seeds of which both runs reach it."""
    steps = [steps_to(each, level) for each in own.values()]
    both = [(a, b) for a, b in pairs if steps_to(a, level) and steps_to(b, level)]
    fewer = ratio([steps_to(b, level) or 0 for _, b in both], [steps_to(a, level) or 0 for a, _ in both])
    both_policies = [(a, b) for a, b in pairs if versions_to(a, level) and versions_to(b, level)]
    fewer_versions = ratio(
        [versions_to(b, level) or 0 for _, b in both_policies], [versions_to(a, level) or 0 for a, _ in both_policies]
    )
    return {
        "reached": sum(each is not None for each in steps),
        "steps_to_level": estimate([each for each in steps if each is not None]),
        "versions_to_level": estimate([v for each in own.values() if (v := versions_to(each, level)) is not None]),
        "seconds_to_level": estimate([s for each in own.values() if (s := seconds_to(each, level)) is not None]),
        "sooner_measured": ratio(
            [seconds_to(b, level) or 0 for _, b in both], [seconds_to(a, level) or 0 for a, _ in both]
        ),
        "sooner_measured_policy": ratio(
            [policy_seconds_to(b, level) or 0 for _, b in both_policies],
            [policy_seconds_to(a, level) or 0 for a, _ in both_policies],
        ),
        "sooner_fleet": _times(fewer, faster_fleet),
        "sooner_fleet_policy": _times(fewer_versions, faster_fleet),
    }


def _times(found: Estimate | None, factor: float | None) -> Estimate | None:
    if found is None or factor is None:
        return None
    return Estimate(found.mean * factor, None if found.half is None else found.half * factor, found.count)


def waited_share(result: Result) -> float:
    """Returns the share of the time from first to last commit in which the trainer neither trains nor publishes."""
    times_s = committed_s(result)
    busy_s = sum(step["seconds"] - step["waited_s"] for step in result["steps"][1:])
    took_s = times_s[-1] - times_s[0]
    return max(0.0, 1.0 - busy_s / took_s) if took_s > 0.0 else 0.0


def _bars(row: Mapping[str, Any]) -> dict[str, Any]:
    """``None``: it cannot be told from what there is."""

    def sooner(name: str) -> bool | None:
        found: Estimate | None = row.get(name)
        return None if found is None else row["reached"] == row["seeds"] and found.mean >= SOONER_BAR

    def reaches(name: str) -> bool | None:
        found: Estimate | None = row[name]
        return None if found is None or found.half is None else found.high >= 0.0

    return {
        "reaches_sync_at_equal_samples": reaches("end_difference"),
        "policy_reaches_sync_at_equal_samples": reaches("policy_difference"),
        "sooner_measured": sooner("sooner_measured"),
        "sooner_fleet": sooner("sooner_fleet"),
    }


def _of_sweep(sweep: Sequence[Result]) -> dict[str, Estimate | None]:
    rates = sorted({result["run"]["learning_rate"] for result in sweep})
    return {
        f"{rate:g}": estimate([mean_reward(each) for each in sweep if each["run"]["learning_rate"] == rate])
        for rate in rates
    }


def _staleness(seeds: Seeds) -> dict[str, dict[str, float | None]]:
    """By staleness: the share of all responses, and the mean of each signal over the runs that have it."""
    found: dict[str, dict[str, float | None]] = {}
    total = sum(each["trajectories"] for result in seeds.values() for each in result["staleness"].values())
    for staleness in sorted({name for result in seeds.values() for name in result["staleness"]}, key=int):
        cells = [result["staleness"][staleness] for result in seeds.values() if staleness in result["staleness"]]
        signals = {
            name: fmean(values) if (values := [each[name] for each in cells if each[name] is not None]) else None
            for name in cells[0]
            if name != "trajectories"
        }
        found[staleness] = {"share": sum(each["trajectories"] for each in cells) / total, **signals}
    return found
