"""How long the core takes to plan and to admit, at 1,024 DP groups and 131,072 requests; what it keeps in memory.

    python perf/planner.py [--workers 1024] [--requests 131072] [--plans 100] [--predictor statistics] [--json]

Every number stands beside a peer of the same run: plans beside one pass of a plain argmin heap that puts the same
requests on the same DP groups (what a router without versions, KV or deadlines does), admission beside that heap's
placements. No model, no network: events in, commands out.
"""

import argparse
import gc
import json
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from heapq import heapify, heapreplace

import numpy as np

from dora.config import validated
from dora.core import Machine
from dora.core import commands as do
from dora.core import events as on
from dora.core.dispatcher import Dispatcher
from dora.core.groups.window import Window
from dora.core.observation import view_of
from dora.core.plan import Trigger
from dora.core.policies import nearest_window
from dora.system.memory import collecting_rarely, keep_freed_memory

GROUP_SIZE = 16
KV_TOKENS = 772_000
STEP_S, PACE_S = 600.0, 0.05  # of a step and of a token


@dataclass(frozen=True)
class Measured:
    """One size. Times in milliseconds where the name says nothing else."""

    policy: str
    workers: int
    requests: int
    plan_p50_ms: float
    plan_p99_ms: float
    snapshot_p50_ms: float
    heap_pass_ms: float  # the peer: an argmin heap places all requests once
    plan_over_heap: float
    window_decisions_per_s: float  # C3's answer alone: may one more group be admitted?
    admitted_groups_per_s: float  # whole: a prompt becomes a group of 16, each response placed on a DP group
    admitted_requests_per_s: float
    heap_requests_per_s: float
    memory_bytes_per_request: float


def fleet(policy: str, predictor: str, workers: int, requests: int) -> tuple[Machine, float]:
    """A machine under full load, and the seconds its admission took."""
    groups = requests // GROUP_SIZE
    window = {"size": nearest_window(policy, 3)}
    machine = Machine(validated({"window": window, "balance": {"policy": policy, "predictor": predictor}}))
    now_s = 0.0
    for index in range(workers):
        machine.handle(on.WorkerJoined(f"w{index}", index + 1, requests // workers, KV_TOKENS), now_s)
    for pending in list(machine.state.pending.values()):
        assert isinstance(pending.command, do.LoadVersion)
        command = pending.command
        machine.handle(on.CommandDone(command.worker_id, command.epoch, command.command_id), now_s)
    (draw,) = (c for c in machine.handle(on.TrainerAttached(1, groups), now_s) if isinstance(c, do.DrawPrompts))
    lengths = np.random.default_rng(0).lognormal(7.0881, 1.2, (draw.count, GROUP_SIZE)).clip(1, 30_000).astype(int)
    prompts = tuple(
        on.OfferedPrompt(f"p{i}", "task", 150, GROUP_SIZE, 30_000, known_tokens=tuple(map(int, row)))
        for i, row in enumerate(lengths)
    )
    with collecting_rarely():  # as the service and the simulator do
        began_s = time.perf_counter()
        machine.handle(on.PromptsOffered(prompts), now_s)
        return machine, time.perf_counter() - began_s


def progress(machine: Machine) -> None:
    """Every DP group reports, so that requests stand at different lengths."""
    rng = np.random.default_rng(1)
    state = machine.state
    state.requests["starting"][:] = 0
    for worker in list(state.workers.values()):
        rows = sorted(worker.rows)
        tokens = {state.request_id[row]: int(n) for row, n in zip(rows, rng.integers(1, 900, len(rows)), strict=True)}
        used = sum(tokens.values()) + 150 * len(tokens)
        machine.handle(on.Progress(worker.worker_id, worker.epoch, worker.loaded, tokens, {}, 0, used), 1.0)


def heap_pass_s(workers: int, requests: int) -> float:
    """Seconds of a plain argmin heap over the DP groups' loads, one placement a request."""
    began_s = time.perf_counter()
    heap = [(0, index) for index in range(workers)]
    heapify(heap)
    for _ in range(requests):
        load, index = heap[0]
        heapreplace(heap, (load + 1, index))
    return time.perf_counter() - began_s


def window_decisions_per_s(decisions: int = 100_000) -> float:
    window = Window(3, decisions)
    began_s = time.perf_counter()
    for _ in range(decisions):
        window.admit(0)
    return decisions / (time.perf_counter() - began_s)


def measured(policy: str, predictor: str, workers: int, requests: int, plans: int) -> Measured:
    keep_freed_memory()  # as the service does
    gc.collect()
    before = _memory_bytes()
    machine, admission_s = fleet(policy, predictor, workers, requests)
    memory = _memory_bytes() - before
    progress(machine)
    state = machine.state
    state.rates.step_s, state.rates.pace_s = STEP_S, PACE_S  # known, so plans go by a schedule where there is one
    views, whole = [], []
    for _ in range(plans):
        state.now_s += state.config.balance.period_s
        began_s = time.perf_counter()
        machine.policy.observe(Dispatcher(state))
        foreseen_s = time.perf_counter()
        view = view_of(state)
        views.append(time.perf_counter() - foreseen_s)
        machine.policy.plan(view, Trigger.TIME)
        whole.append(time.perf_counter() - began_s)
    heap_s = heap_pass_s(workers, requests)
    admitted = state.counters.groups_admitted
    return Measured(
        policy=policy,
        workers=workers,
        requests=state.requests.used,
        plan_p50_ms=1e3 * float(np.percentile(whole, 50)),
        plan_p99_ms=1e3 * float(np.percentile(whole, 99)),
        snapshot_p50_ms=1e3 * float(np.percentile(views, 50)),
        heap_pass_ms=1e3 * heap_s,
        plan_over_heap=float(np.percentile(whole, 50)) / heap_s,
        window_decisions_per_s=window_decisions_per_s(),
        admitted_groups_per_s=admitted / admission_s,
        admitted_requests_per_s=admitted * GROUP_SIZE / admission_s,
        heap_requests_per_s=requests / heap_s,
        memory_bytes_per_request=memory / max(1, state.requests.used),
    )


def _memory_bytes() -> float:
    """Peak resident memory of this process so far; it takes one measurement only."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1024, help="DP groups")
    parser.add_argument("--requests", type=int, default=131_072)
    parser.add_argument("--plans", type=int, default=100)
    parser.add_argument("--policy", action="append", help="may be repeated; by default laxity and dora")
    parser.add_argument("--predictor", default="oracle", help="oracle: lengths are known; statistics: believed")
    parser.add_argument("--only", action="store_true", help="this size alone, not a half and a quarter of it too")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    runs = [
        (policy, options.predictor, options.workers // part, options.requests // part, options.plans)
        for policy in options.policy or ["laxity", "dora"]
        for part in ((1,) if options.only else (4, 2, 1))
    ]
    rows = [asdict(measured(*runs[0]))] if len(runs) == 1 else [alone(*run) for run in runs]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    for name in rows[0]:
        cells = [f"{row[name]:>14,.1f}" if isinstance(row[name], float) else f"{row[name]:>14}" for row in rows]
        print(f"{name:26}", *cells)


def alone(policy: str, predictor: str, workers: int, requests: int, plans: int) -> dict[str, object]:
    """One policy and size in a process of its own: peak memory never falls, so a second one would find it raised."""
    size = ["--workers", str(workers), "--requests", str(requests), "--plans", str(plans), "--policy", policy]
    size += ["--predictor", predictor]
    done = subprocess.run(
        [sys.executable, __file__, *size, "--only", "--json"], capture_output=True, text=True, check=True
    )
    (row,) = json.loads(done.stdout)
    return row


if __name__ == "__main__":
    main()
