"""How short could steps be if moves, loads and preemption cost nothing? A yardstick for strategies.

    python -m experiments.ideal [--preset dora-128] [--window 3] [--steps 40] [--seed 0] [--overcommit 0.5] [--json]

What stays: the cost model, KV and slots, DP groups that come whole and host one version each, the core's own window,
the trainer, and chance, as each seed draws other lengths. What goes: requests move at once and for nothing, so that
those of a version are one pool; DP groups change version in no time; nothing is computed again.

Each older version has as many DP groups as its KV takes, rounded up; the newest has the rest. A version with room
begins the longest waiting prompt that it may. Where lengths are *known* that is one whose responses end in time on
full DP groups (for the newest version any, where none does). Where they are *believed*, as what prompts show of their
length, it is one of the shorter ones, of fewer the older the version is (``at_once``, ``begun`` of laxity's tuning.py).
Where they are *unknown* it is the first, as long as anything may begin at that age.

``--overcommit``: so much of a DP group may an older version be short of. What exceeds its KV takes turns, as if it were
parked in host memory for nothing. It is no bound, as a better order may be faster; it says what friction costs.
Environments, filters and shared accelerators are left out.
"""

import argparse
import json
from dataclasses import dataclass, field
from math import ceil
from typing import Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from dora.core.forecast.cost import CostModel
from dora.core.groups.window import Window
from dora.core.policies.laxity.tuning import TUNING
from dora.lab.sim.extent import bound_of_s, expected_bound_s
from dora.lab.sim.presets import preset
from dora.lab.sim.scenario import Scenario
from dora.lab.sim.traces import FloatColumn
from dora.lab.sim.workload import SimPrompt, WorkloadStream, moments

FILL: Final = 0.985  # share of the KV that is used: what exceeds it later takes turns
ROOM_TOKENS: Final = 800.0  # KV that a request needs to begin
TICKS: Final = 160  # in a step as long as is expected
SETTLING: Final = 12  # steps before the first that counts
WAITING_STEPS: Final = 2  # steps' worth of prompts that wait
STEP_BOUNDS: Final = 1.1  # a step is expected to take so many times its bound, where training takes less
LENGTHS: Final = ("known", "believed", "unknown")


@dataclass
class Pool:
    """One version's open groups, a row each, and a column for each response."""

    lengths: FloatColumn
    prompts: FloatColumn
    done: FloatColumn = field(init=False)  # tokens so far

    def __post_init__(self) -> None:
        self.done = np.zeros_like(self.lengths)

    def running(self) -> NDArray[np.bool_]:
        return self.done < self.lengths

    def kv(self, rows: NDArray[np.bool_]) -> float:
        return float((self.done + self.prompts)[rows].sum())

    def add(self, prompts: list[SimPrompt]) -> None:
        new = pool(prompts)
        self.lengths = np.concatenate([self.lengths, new.lengths])
        self.prompts = np.concatenate([self.prompts, new.prompts])
        self.done = np.concatenate([self.done, new.done])

    def drop(self, rows: NDArray[np.int64]) -> None:
        self.lengths, self.prompts, self.done = (
            np.delete(column, rows, axis=0) for column in (self.lengths, self.prompts, self.done)
        )


def pool(prompts: list[SimPrompt]) -> Pool:
    lengths = np.array([prompt.lengths for prompt in prompts], dtype=np.float64)
    return Pool(lengths, np.broadcast_to([[float(prompt.prompt_tokens)] for prompt in prompts], lengths.shape))


class Ideal:
    """A run. ``lengths``: one of LENGTHS. ``overcommit``: DP groups that an older version may be short of."""

    def __init__(self, scenario: Scenario, window: int, seed: int, lengths: str, overcommit: float) -> None:
        self.scenario, self.lengths, self.overcommit = scenario, lengths, overcommit
        self.cost, self.cluster = CostModel.of(scenario.cluster.cost), scenario.cluster
        self.tail_s = scenario.trainer.step_s / scenario.trainer.micro_batches  # training after a step's last group
        self.expected_s = max(STEP_BOUNDS * expected_bound_s(scenario), scenario.trainer.step_s)
        self.tick_s = self.expected_s / TICKS
        self.pace_s = full_pace_s(scenario)
        self.window = Window(window, scenario.trainer.groups_per_step)
        self.stream = WorkloadStream(scenario.workload, seed, scenario.trainer.groups_per_step)
        self.waiting = self.stream.take(WAITING_STEPS * scenario.trainer.groups_per_step)
        self.longest = self._longest(self.waiting)
        self.pools = {0: self._empty()}
        self.since_s = 0.0  # the newest version was published
        self.work = np.zeros(2)  # tokens, and context-tokens, computed
        self.consumed = np.zeros(2)  # the same, of what was trained on

    def step(self) -> float:
        """Until the next version is published; seconds."""
        filled_s = 0.0
        while not filled_s or self.since_s < max(filled_s + self.tail_s, self.scenario.trainer.step_s):
            self.since_s += self.tick_s
            groups = self._dp_groups()
            for version, each in self.pools.items():
                if groups[version]:
                    self._begin(version, groups[version])
                    self._decode(each, groups[version])
            self._take()
            if not filled_s and self.window.step > self.window.newest:
                filled_s = self.since_s
        took_s, self.since_s = self.since_s, 0.0
        self.pools[self.window.publish()] = self._empty()
        self.pools = {version: each for version, each in self.pools.items() if version >= self.window.oldest_live}
        return took_s

    def _dp_groups(self) -> dict[int, int]:
        """The oldest version takes what it needs first; the newest has what is left."""
        left, groups = self.cluster.engines, {}
        for version, each in self.pools.items():
            rows = each.running()
            need = max(each.kv(rows) / (FILL * self.cluster.kv_tokens), rows.sum() / self.cluster.slots)
            least = 1 if rows.any() else 0
            wanted = left if version == self.window.newest else max(least, ceil(need - self.overcommit))
            groups[version] = min(left, wanted)
            left -= groups[version]
        return groups

    def _begin(self, version: int, groups: int) -> None:
        """The longest that may begin, as far as KV, slots and the window have room."""
        each = self.pools[version]
        rows = each.running()
        room = min(
            groups * self.cluster.slots - rows.sum(),
            (groups * FILL * self.cluster.kv_tokens - each.kv(rows)) / ROOM_TOKENS,
        )
        count = min(int(room // each.lengths.shape[1]), self.window.admissible(version))
        if count < 1:
            return
        may = self._may_begin(version)
        chosen = may[np.argsort(-self.longest[may], kind="stable")][:count]
        if not len(chosen):
            return
        each.add([self.waiting[index] for index in chosen])
        for _ in chosen:
            self.window.admit(version)
        kept = np.delete(np.arange(len(self.waiting)), chosen)
        drawn = self.stream.take(len(chosen))
        self.waiting = [*(self.waiting[index] for index in kept), *drawn]
        self.longest = np.concatenate([self.longest[kept], self._longest(drawn)])

    def _may_begin(self, version: int) -> NDArray[np.int64]:
        """Indices of the waiting prompts that a version may begin at its age."""
        age = self.window.newest - version + self.since_s / self.expected_s
        if self.lengths == "known":
            left_s = (self.window.size - age) * self.expected_s - self.tail_s
            in_time = np.flatnonzero(self.longest * self.pace_s <= left_s)
            late = version == self.window.newest and not len(in_time)
            return np.arange(len(self.waiting)) if late else in_time  # rather than nothing
        share = 1.0 - (age / self.window.size - TUNING.at_once) / (TUNING.begun - TUNING.at_once)
        if self.lengths == "unknown":
            return np.arange(len(self.waiting) if share > 0.0 or version == self.window.newest else 0)
        count = min(len(self.waiting), max(1, round(share * len(self.waiting))))
        return np.flatnonzero(self.longest <= np.sort(self.longest)[count - 1])

    def _longest(self, prompts: list[SimPrompt]) -> FloatColumn:
        """Returns the key of a comparison of prompts: their longest response, its features, or nothing."""
        if self.lengths == "known":
            return np.array([max(prompt.lengths) for prompt in prompts], dtype=np.float64)
        if self.lengths == "believed":
            return np.array([sum(prompt.features) for prompt in prompts])
        return np.zeros(len(prompts))

    def _decode(self, each: Pool, groups: int) -> None:
        """All responses of a version go on at one pace; where they exceed slots or KV they take turns."""
        rows = each.running()
        count, kv = int(rows.sum()), each.kv(rows)
        if not count:
            return
        share = min(1.0, groups * self.cluster.kv_tokens / kv, groups * self.cluster.slots / count)
        pace_s = self.cost.decode_step_s(max(1, round(share * count / groups)), share * kv / groups)
        before = each.done.copy()
        each.done[rows] += share * self.tick_s / pace_s
        np.minimum(each.done, each.lengths, out=each.done)
        self.work += work(each.done - before, (each.done + before) / 2 + each.prompts)

    def _take(self) -> None:
        """The step takes finished groups, those of the earliest deadline first."""
        for version, each in self.pools.items():
            finished = np.flatnonzero(~each.running().any(axis=1))
            taken = 0
            while taken < len(finished) and self.window.takeable(self.window.deadline(version)):
                self.window.take(version, self.window.deadline(version))
                taken += 1
            rows = finished[:taken]
            self.consumed += work(each.lengths[rows], each.lengths[rows] / 2 + each.prompts[rows])
            each.drop(rows)

    def _empty(self) -> Pool:
        return Pool(*np.zeros((2, 0, self.scenario.workload.group_size)))


def work(tokens: FloatColumn, contexts: FloatColumn) -> FloatColumn:
    """Tokens, and context-tokens."""
    return np.array([tokens.sum(), (tokens * contexts).sum()])


def full_pace_s(scenario: Scenario) -> float:
    """Seconds a token on a DP group whose KV is full of the workload's usual mixture."""
    cluster, expected = scenario.cluster, moments(scenario.workload)
    context = expected.context_tokens(1) / expected.generated_tokens(1)
    return CostModel.of(cluster.cost).decode_step_s(
        min(cluster.slots, int(cluster.kv_tokens / context)), cluster.kv_tokens
    )


def measure(
    scenario: Scenario, window: int, steps: int, seed: int, lengths: str, overcommit: float
) -> dict[str, object]:
    """One run: minutes a step, the bound of what it consumed, and the one over the other and over work by consumed."""
    run = Ideal(scenario, window, seed, lengths, overcommit)
    for _ in range(SETTLING):
        run.step()
    run.work[:], run.consumed[:] = 0.0, 0.0
    what = f"{scenario.name}, {lengths}"
    took_s = float(np.mean([run.step() for _ in track(range(steps), what, console=Console(stderr=True))]))
    done_s, consumed_s = (bound_of_s(scenario, *(each / steps).tolist()) for each in (run.work, run.consumed))
    return {
        "preset": scenario.name,
        "window": window,
        "lengths": lengths,
        "overcommit": overcommit,
        "step_min": took_s / 60,
        "bound_consumed_min": consumed_s / 60,
        "work_done_over_consumed": done_s / consumed_s,
        "over_bound": took_s / done_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", nargs="+", default=["dora-64", "dora-128"])
    parser.add_argument("--window", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help=f"after {SETTLING} that do not count")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--overcommit", type=float, default=0.0, help="DP groups, 0 to below 1")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.window < 2 or options.steps < 1 or not 0.0 <= options.overcommit < 1.0:
        parser.error("--window must be at least 2, --steps at least 1, --overcommit from 0 to below 1")
    rows = [
        measure(preset(name), options.window, options.steps, options.seed, lengths, options.overcommit)
        for name in options.preset
        for lengths in LENGTHS
    ]
    print(json.dumps({"rows": rows})) if options.json else show(rows)


def show(rows: list[dict[str, object]]) -> None:
    first = rows[0]
    table = Table(title=f"Steps without friction: window {first['window']}, overcommit {first['overcommit']}")
    headings = {
        "preset": "preset",
        "lengths": "lengths",
        "step_min": "step, min",
        "bound_consumed_min": "bound, min",
        "work_done_over_consumed": "work / consumed",
        "over_bound": "over bound",
    }
    for name, heading in headings.items():
        table.add_column(heading, justify="left" if isinstance(first[name], str) else "right")
    for row in rows:
        cells = (row[name] for name in headings)
        table.add_row(*(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells))
    Console().print(table)


if __name__ == "__main__":
    main()
