"""How short could steps be if nothing but slots, KV, deadlines and whole DP groups cost anything? A yardstick.

    python perf/ideal.py [--preset dora-128] [--window 3] [--versions 40] [--json]

A version comes every T minutes and begins one batch, the groups believed to be longest first, as DP groups have room.
Requests move at once and for nothing, so a version is one pool of KV; what outgrows it shares it and computes nothing
again. Older versions have as many DP groups as their KV takes, rounded up, and fill them with groups of their own; the
newest has the rest. A response that has not ended ``window`` steps after its version came is late. Printed is the
shortest T with less than one late response a version, beside the bubble-free bound. It is no bound itself: who reserves
KV for known lengths, or keeps fast lanes, may be faster. It says what knowing less costs where all else is free.
"""

import argparse
import json
from dataclasses import dataclass, field
from math import ceil
from typing import Final

import numpy as np
from rich.console import Console
from rich.table import Table

from dora.orchestrator.core.cost import CostModel
from dora.orchestrator.core.table import Column
from dora.sim.presets import preset
from dora.sim.run import expected_bound_s
from dora.sim.scenario import Scenario
from dora.sim.workload import WorkloadStream

FILL: Final = 0.955  # share of the KV that is used, as in `laxity` with believed lengths
ROOM_TOKENS: Final = 400.0  # KV that a request needs to begin
TICK_S: Final = 2.0
SETTLING: Final = 20  # versions before the first that counts
LATE: Final = 1.0  # responses a version
TRIED: Final = np.linspace(1.0, 1.4, 41)  # values of T, in bounds


@dataclass
class Batch:
    """One version's responses, in the order in which they begin."""

    lengths: Column
    prompts: Column
    done: Column = field(init=False)  # tokens so far
    begun: int = 0

    def __post_init__(self) -> None:
        self.done = np.zeros(len(self.lengths))

    def running(self) -> Column:
        return np.flatnonzero(self.done[: self.begun] < self.lengths[: self.begun])

    def unfinished(self) -> int:
        return len(self.lengths) - self.begun + len(self.running())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", nargs="+", default=["dora-64", "dora-128"])
    parser.add_argument("--window", type=int, default=3)
    parser.add_argument("--versions", type=int, default=40, help="how many are simulated")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.window < 2 or options.versions <= SETTLING + options.window:
        parser.error(f"--window must be at least 2, --versions more than window + {SETTLING}")
    rows = []
    for name in options.preset:
        scenario = preset(name)
        bound = expected_bound_s(scenario)
        for order in ("known", "believed", "unknown"):
            step_s = shortest(scenario, options.window, options.versions, order, bound)
            minutes, ratio = (step_s / 60, step_s / bound) if step_s else (None, None)
            row = {"preset": name, "window": options.window, "lengths": order}
            rows.append({**row, "step_min": minutes, "bound_min": bound / 60, "over_bound": ratio})
    print(json.dumps({"rows": rows})) if options.json else show(rows)


def shortest(scenario: Scenario, window: int, versions: int, order: str, bound: float) -> float:
    """The shortest step in seconds that is not late; 0 where none of those tried is."""
    for share in TRIED.tolist():
        if late(scenario, window, versions, order, share * bound) < LATE:
            return share * bound
    return 0.0


def late(scenario: Scenario, window: int, versions: int, order: str, step_s: float) -> float:
    """Late responses a version, on average."""
    stream = WorkloadStream(scenario.workload, 0, scenario.trainer.groups_per_step)
    ticks = ceil(step_s / TICK_S)
    live: list[Batch] = []
    found = []
    for version in range(versions):
        live = [*live[1 - window :], batch(stream, scenario.trainer.groups_per_step, order)]
        for _ in range(ticks):
            tick(scenario, live, step_s / ticks)
        if len(live) == window and version >= SETTLING:
            found.append(live[0].unfinished())
    return float(np.mean(found))


def batch(stream: WorkloadStream, groups: int, order: str) -> Batch:
    """The next groups of the workload: by length, by what their prompts show of it, or as they come."""
    prompts = stream.take(groups)
    if order == "known":
        prompts.sort(key=lambda prompt: -max(prompt.lengths))
    elif order == "believed":
        prompts.sort(key=lambda prompt: -sum(prompt.features))
    lengths = np.array([prompt.lengths for prompt in prompts], dtype=np.float64)
    contexts = np.array([prompt.prompt_tokens for prompt in prompts], dtype=np.float64)
    return Batch(lengths.ravel(), np.repeat(contexts, lengths.shape[1]))


def tick(scenario: Scenario, live: list[Batch], seconds: float) -> None:
    """The oldest version takes the DP groups that it needs first; the newest has what is left."""
    cluster, cost = scenario.cluster, scenario.cluster.cost.model()
    left = float(cluster.engines)
    for each in live:
        rows = each.running()
        kv = float((each.done[rows] + each.prompts[rows]).sum())
        need = max(kv / (FILL * cluster.kv_tokens), len(rows) / cluster.slots)
        engines = left if each is live[-1] else min(left, ceil(need))
        left -= engines
        room = min(engines * cluster.slots - len(rows), (engines * FILL * cluster.kv_tokens - kv) / ROOM_TOKENS)
        begin = int(max(0.0, min(room, len(each.lengths) - each.begun)))
        rows = np.concatenate([rows, np.arange(each.begun, each.begun + begin)])
        each.begun += begin
        if len(rows) and engines:
            decode(each, rows, engines, seconds, scenario, cost)


def decode(each: Batch, rows: Column, engines: float, seconds: float, scenario: Scenario, cost: CostModel) -> None:
    """All of these go on at one pace; where they exceed slots or KV they take turns."""
    cluster = scenario.cluster
    kv = float((each.done[rows] + each.prompts[rows]).sum())
    share = min(1.0, engines / max(kv / cluster.kv_tokens, len(rows) / cluster.slots))
    pace_s = cost.decode_step_s(max(1, round(share * len(rows) / engines)), share * kv / engines)
    each.done[rows] += share * seconds / pace_s


def show(rows: list[dict[str, object]]) -> None:
    table = Table(title="Shortest steps without friction")
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right" if name.endswith(("min", "bound")) else "left")
    for row in rows:
        table.add_row(*(f"{cell:.2f}" if isinstance(cell, float) else str(cell or "-") for cell in row.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
