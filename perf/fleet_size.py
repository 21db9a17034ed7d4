"""A generated day: responses get three times as long, then the trainer slows down; who chooses the number of workers?

    python perf/fleet_size.py --json

The real core on the preset ``small`` with longer steps, a day of four phases. *auto* follows ``FleetSize``; *best
fixed* is the number of workers with the least cost over the whole day; the *oracle* knows each phase's best number
beforehand. A step's cost is its time, times one for the trainer and ``--price`` for each worker.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from dora.core import events as on
from dora.core.forecast.fleet_size import FleetSize
from dora.lab.sim.ledger import SimGroup
from dora.lab.sim.presets import preset
from dora.lab.sim.scenario import Scenario
from dora.lab.sim.workload import SimPrompt
from dora.lab.sim.world import World

START_S = 20.0  # from a wish to a worker that has joined
LOOK_S = 5.0
GROUPS, STEP_S = 32, 30.0  # steps longer than the longest response


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the day: how much longer responses are, and how much slower training."""

    name: str
    longer: float
    slower: float


DAY = (Phase("morning", 1.0, 1.0), Phase("long", 3.0, 1.0), Phase("slow", 3.0, 3.0), Phase("evening", 1.0, 1.0))


@dataclass(slots=True)
class Spent:
    steps: int = 0
    seconds: float = 0.0
    worker_s: float = 0.0

    def cost(self, price: float) -> float:
        return (self.seconds + price * self.worker_s) / max(1, self.steps)


class Day(World):
    """A run whose phases take ``phase_s`` each. ``size`` is None where the number of workers is fixed."""

    def __init__(self, scenario: Scenario, phases: Sequence[Phase], phase_s: float, size: FleetSize | None) -> None:
        self._phases, self._phase_s, self._size = phases, phase_s, size
        self._named = 0
        super().__init__(scenario, seed=0)
        self.spent = [Spent() for _ in phases]
        self.sizes: list[int] = []
        self._pace = self.trainer.pace
        self._seen_s = 0.0
        self._asked = scenario.cluster.engines
        self.trainer.on_step = self._stepped
        self.after(LOOK_S, self._look)

    @property
    def phase(self) -> int:
        return min(int(self.now_s / self._phase_s), len(self._phases) - 1)

    def offer(self, drawn: list[SimPrompt], exhausted: bool = False) -> None:
        longer, most = self._phases[self.phase].longer, self.scenario.workload.lengths.cap_tokens
        scaled = [
            replace(each, lengths=tuple(min(most, round(longer * tokens)) for tokens in each.lengths)) for each in drawn
        ]
        super().offer(scaled, exhausted)

    def _stepped(
        self, step: int, began_s: float, ended_s: float, groups: list[SimGroup], busy: list[tuple[float, float]]
    ) -> None:
        spent = self.spent[self.phase]
        spent.steps += 1
        spent.seconds += ended_s - began_s
        if self._size is not None:
            took_s = ended_s - began_s
            self._size.committed(took_s, max(0.0, took_s - sum(end - begin for begin, end in busy)))

    def _look(self) -> None:
        self.trainer.pace = self._pace.model_copy(
            update={"step_s": self._pace.step_s * self._phases[self.phase].slower}
        )
        live = [worker for worker in self.machine.state.workers.values() if not worker.draining]
        self.spent[self.phase].worker_s += LOOK_S * len(self.workers)
        self.sizes.append(len(live))
        if self._size is not None:
            slots, kv = sum(worker.slots for worker in live), sum(worker.kv_tokens for worker in live)
            used = max(sum(worker.assigned for worker in live) / slots, sum(w.kv_used for w in live) / kv)
            self._size.looked(self.now_s, len(live), used)
            if self._asked == len(live) and (wish := self._size.wish(self.now_s, 1, 16)) is not None:
                self._ask(wish.workers, live)
        self.after(LOOK_S, self._look)

    def _join(self, name: str) -> None:
        self.join(name)

    def _ask(self, workers: int, live: Sequence[Any]) -> None:
        self._asked = workers
        for _ in range(workers - len(live)):
            self._named += 1
            self.after(START_S, self._join, f"more-{self._named}")
        for worker in sorted(live, key=lambda each: each.kv_used)[: max(0, len(live) - workers)]:
            self.post(on.DrainRequested(worker.worker_id))


def day(workers: int, phases: Sequence[Phase], phase_s: float, size: FleetSize | None) -> Day:
    scenario = preset("small")
    cluster = scenario.cluster.model_copy(update={"gpus": workers + 2, "rollout_gpus": workers})
    trainer = scenario.trainer.model_copy(update={"groups_per_step": GROUPS, "step_s": STEP_S})
    world = Day(scenario.model_copy(update={"cluster": cluster, "trainer": trainer}), phases, phase_s, size)
    world.run_until(lambda: world.now_s >= phase_s * len(phases), 10 * phase_s * len(phases))
    return world


def measured(phase_s: float, price: float, most: int) -> dict[str, Any]:
    fixed = {workers: day(workers, DAY, phase_s, None).spent for workers in range(1, most + 1)}
    best = min(fixed, key=lambda workers: total(fixed[workers]).cost(price))
    oracle = [min((fixed[n][index] for n in fixed), key=lambda each: each.cost(price)) for index in range(len(DAY))]
    auto = day(best, DAY, phase_s, FleetSize(price, 60.0))
    rows = {"auto": total(auto.spent), f"best fixed: {best}": total(fixed[best]), "oracle": total(oracle)}
    found = {name: row(each, price) for name, each in rows.items()}
    own, ideal, flat = found["auto"], found["oracle"], found[f"best fixed: {best}"]
    return {
        "rows": found,
        "worker_time_of_oracle": own["worker_s_per_step"] / ideal["worker_s_per_step"],
        "step_time_of_best_fixed": own["step_s"] / flat["step_s"],
        "cost_of_oracle": own["cost"] / ideal["cost"],
        "cost_of_best_fixed": own["cost"] / flat["cost"],
        "workers_by_phase": [sum(part) / len(part) for part in parts(auto.sizes, len(DAY))],
        "oracle_by_phase": [min(fixed, key=lambda n: fixed[n][index].cost(price)) for index in range(len(DAY))],
    }


def row(spent: Spent, price: float) -> dict[str, float]:
    each = {"step_s": spent.seconds, "worker_s_per_step": spent.worker_s}
    return {**{name: value / spent.steps for name, value in each.items()}, "cost": spent.cost(price)}


def total(spent: Sequence[Spent]) -> Spent:
    return Spent(sum(e.steps for e in spent), sum(e.seconds for e in spent), sum(e.worker_s for e in spent))


def parts(values: Sequence[int], count: int) -> list[Sequence[int]]:
    size = len(values) // count
    return [values[index * size : (index + 1) * size] for index in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phase-s", type=float, default=3000.0, help="simulated seconds of each of the four phases")
    parser.add_argument("--price", type=float, default=0.05, help="of a worker, in units of the rest of the cluster")
    parser.add_argument("--most", type=int, default=6, help="workers")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measured(options.phase_s, options.price, options.most)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    table = Table("", "step (s)", "worker-seconds a step", "cost")
    for name, row in found["rows"].items():
        table.add_row(name, *(f"{value:.2f}" for value in row.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
