"""What machines cost that a scheduler takes and gives back.

    python perf/cluster.py [--only notice spot kinds] [--hours 2] [--steps 14] [--json]
    python perf/cluster.py --only join [--json]
    PYTHONPATH=. python perf/cluster.py --only slurm ray --spot-minutes 20 [--nodes 12] [--json]

In the simulator, which drives the service's own core:
notice: engines with up to 200 GB of KV, and a 30 s notice for one machine after the other, on links of 10 GB/s. Counts
what becomes of the KV that a machine has at its notice: it moves, its response ends in place, or it is lost.
spot: every 60 s a machine is taken with a 30 s notice, and another one comes 30 s after it has gone. The time of a
step, of 24 machines, beside that of the same machines undisturbed. Generation is the bottleneck of both.
kinds: two kinds of machines in two zones (the preset two-kinds-128). The time of a step over the bubble-free time of
the sum of their capacities: by the default policy, by one that takes a worker with room at random and knows neither
speeds nor zones, and of each kind alone over its own.
The simulator's ledger raises if a group is lost, delivered twice, of two versions or too stale.

With real processes (perf/cluster_real.py):
join: 64 hosts join one service, which is a process of its own. Four processes that have imported everything speak for
the hosts, each with the code and the connection of `dora host`, and the model, but no worker. Then the 16 hosts of one
process are killed, and those of another stop. Times are to the service's status; its CPU seconds are printed, too.
slurm: nodes of a real Slurm on this machine, each a host with a worker, whose engine is a fake one of a fixed pace. By
turns of four minutes all is undisturbed, and a job of more rank takes a node every 60 s for 30 s, with 30 s of notice.
The time of a step in both kinds of turns, for so many minutes of each.
ray: the same on a real Ray, which drains a node within 30 s every 60 s. Its raylet is killed then, and a new one starts
after 25 s.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final
from zlib import crc32

import cluster_real
import numpy as np

from dora.config import WindowConfig
from dora.core import commands as do
from dora.core import events as on
from dora.core.dispatcher import Dispatcher
from dora.core.fleet.worker import Worker
from dora.core.plan import Move, Plan, Trigger
from dora.core.policies import POLICIES, register
from dora.core.policies.laxity import LaxityPolicy
from dora.core.state import IDLE, RUNNING, WAITING
from dora.core.view import View
from dora.lab.sim.extent import expected_bound_s
from dora.lab.sim.invariants import check_state
from dora.lab.sim.presets import preset
from dora.lab.sim.run import simulate
from dora.lab.sim.scenario import Cluster, EngineKind, Lengths, Scenario, TrainerPace, Workload
from dora.lab.sim.watch import Watch
from dora.lab.sim.world import World
from dora.system.memory import collecting_rarely

NOTICE_S: Final = 30.0
LINK_BYTES_PER_S: Final = 10e9
PERIOD_S: Final = 60.0  # between two notices of spot machines
AWAY_S: Final = 30.0  # until another machine has come
WARMUP_STEPS: Final = 3
BEGIN_S: Final = 300.0  # engines are full then


def scenario(hosts: int, slots: int, kv_tokens: int, groups_per_step: int) -> Scenario:
    """One engine and one pool a machine; the trainer waits for generation."""
    links = {"link_bytes_per_s": LINK_BYTES_PER_S, "pool_bytes_per_s": LINK_BYTES_PER_S}
    sizes = {"slots": slots, "kv_tokens": kv_tokens, "pools": hosts, "pool_tokens": 2 * kv_tokens}
    return Scenario(
        name="spot",
        window=WindowConfig(size=3),
        cluster=Cluster(gpus=8 * hosts, rollout_gpus=4 * hosts, hosts=hosts, **links, **sizes),
        trainer=TrainerPace(groups_per_step=groups_per_step, step_s=30.0, micro_batches=4),
        workload=Workload(group_size=8, lengths=Lengths(mu=7.5, sigma=0.9, cap_tokens=16_000)),
    )


@dataclass
class Fates:
    """The KV tokens of machines at their notices, by what became of them."""

    moved: int = 0
    ended: int = 0
    left: int = 0
    again: int = 0  # of those moved, computed again before the next notice
    fullest: int = 0  # of one machine
    _held: dict[str, int] = field(default_factory=dict)  # of the present notice
    _gone: set[str] = field(default_factory=set)

    def noticed(self, world: World, host: str) -> None:
        state = world.machine.state
        ends = [*state.workers.values(), *state.pools.values()]
        rows = [row for end in ends if end.host == host for row in (*end.rows, *getattr(end, "kept", ()))]
        self._held, self._gone = {state.request_id[row]: state.kv_of(row) for row in rows}, set()
        self.fullest = max(self.fullest, sum(self._held.values()))

    def taken(self, world: World, host: str) -> None:
        """Called just before the machine ends."""
        state = world.machine.state
        for request_id, kv_tokens in self._held.items():
            row = state.request_row.get(request_id)
            if row is None or state.requests["status"][row] not in (WAITING, RUNNING, IDLE):
                self.ended += kv_tokens
                continue
            end = state.owner(row) or state.pool_of(row)
            if end is None or end.host == host:
                self.left += kv_tokens
            else:
                self.moved += kv_tokens
                self._gone.add(request_id)

    def saw(self, _now_s: float, _event: on.Event, commands: list[do.Command]) -> None:
        for command in commands:
            if isinstance(command, do.StartRequest) and command.request_id in self._gone:
                self.again += self._held[command.request_id]


def notice(options: argparse.Namespace) -> dict[str, Any]:
    hosts = 6
    world, fates = _world(scenario(hosts, 256, 772_000, 192)), Fates()
    world.observers.append(fates.saw)
    for number in range(hosts):
        host, at_s = f"h{number}", BEGIN_S + 4 * NOTICE_S * number
        world.run_until(lambda at_s=at_s: world.now_s >= at_s)
        fates.noticed(world, host)
        world.after(NOTICE_S, fates.taken, world, host)
        world.notice(host, NOTICE_S, AWAY_S)
    world.run_until(lambda: world.now_s >= at_s + 4 * NOTICE_S)
    token_gb = world.scenario.cluster.kv_token_bytes / 1e9
    return {
        "machines": hosts,
        "fullest_gb": fates.fullest * token_gb,
        "moved_gb": fates.moved * token_gb,
        "ended_in_place_gb": fates.ended * token_gb,
        "lost_gb": fates.left * token_gb,
        "moved_share": fates.moved / (fates.moved + fates.left),
        "moved_and_computed_again_gb": fates.again * token_gb,
    }


def spot(options: argparse.Namespace) -> dict[str, Any]:
    owned, taken = (_steps(options.hours * 3600.0, is_spot) for is_spot in (False, True))
    return {
        "machines_taken": taken["taken"],
        "groups_trained": taken["groups"],
        "step_owned_s": owned["step_s"],
        "step_spot_s": taken["step_s"],
        "spot_over_owned": taken["step_s"] / owned["step_s"],
        "requests_computed_again_by_loss": taken["orphaned"],
    }


def _steps(limit_s: float, is_spot: bool) -> dict[str, float]:
    hosts = 24
    world, commits = _world(scenario(hosts, 128, 400_000, 256)), list[float]()
    world.observers.append(lambda now_s, event, _: commits.append(now_s) if type(event) is on.StepCommitted else None)

    def take(number: int) -> None:
        world.notice(f"h{number % hosts}", NOTICE_S, AWAY_S)
        world.after(PERIOD_S, take, number + 1)

    if is_spot:
        world.after(PERIOD_S, take, 0)
    world.run_until(lambda: world.now_s >= limit_s)
    check_state(world.machine.state)
    counters = world.machine.counters
    if len(commits) <= WARMUP_STEPS:
        sys.exit(f"--hours had {len(commits)} steps: it takes more than {WARMUP_STEPS}, about 0.15 hours")
    step_s = (commits[-1] - commits[WARMUP_STEPS - 1]) / (len(commits) - WARMUP_STEPS)
    found = {"step_s": step_s, "groups": counters.groups_trained, "orphaned": counters.requests_orphaned}
    return found | {"taken": counters.hosts_noticed}


class RandomPolicy(LaxityPolicy):
    """The default policy, which takes any worker with room and takes all machines as alike."""

    def room(self, dispatcher: Dispatcher, worker: Worker) -> float:
        has_room = super().room(dispatcher, worker) > 0.0
        return (1 + crc32(b"%d %d" % (worker.index, dispatcher.backlog.arrivals + worker.assigned))) * has_room

    def observe(self, dispatcher: Dispatcher) -> None:
        super().observe(_alike(dispatcher))

    def dispatch(self, dispatcher: Dispatcher) -> None:
        super().dispatch(_alike(dispatcher))

    def plan(self, view: View, trigger: Trigger) -> Plan:
        return super().plan(_seen_alike(view), trigger)

    def relieve(self, view: View) -> tuple[Move, ...]:
        return super().relieve(_seen_alike(view))


class _Alike(Dispatcher):
    are_unlike = False


def _alike(dispatcher: Dispatcher) -> Dispatcher:
    return _Alike(dispatcher._state)


def _seen_alike(view: View) -> View:
    workers = replace(view.workers, step_scale=np.ones(len(view.workers.alive)))
    return replace(view, workers=workers, crosses=lambda one, other, kv_tokens: True)


def kinds(options: argparse.Namespace) -> dict[str, Any]:
    if "random_kinds" not in POLICIES:
        register("random_kinds", RandomPolicy)
    both = preset("two-kinds-128")
    at_random = both.model_copy(update={"balance": both.balance.model_copy(update={"policy": "random_kinds"})})
    alone = {f"{kind.name}_alone": _of_kind(both, kind) for kind in both.cluster.kinds}
    found = {}
    for name, each in {"both": both, "at_random": at_random, **alone}.items():
        report = simulate(each, steps=options.steps, warmup=WARMUP_STEPS, seed=0)
        found[f"{name}_step_s"] = 60.0 * report.step_time_min
        found[f"{name}_over_bubble_free"] = report.step_time_min / report.bound_consumed_min
    return found


def _of_kind(both: Scenario, kind: EngineKind) -> Scenario:
    """The scenario with the engines of one kind, and as many groups a step as these are of all capacity."""
    cluster = both.cluster.model_copy(
        update={"kinds": (kind,), "rollout_gpus": both.cluster.gpus_per_engine * kind.engines}
    )
    alone = both.model_copy(update={"cluster": cluster})
    share = expected_bound_s(both) / expected_bound_s(alone)
    groups = both.trainer.micro_batches * round(both.trainer.groups_per_step * share / both.trainer.micro_batches)
    return alone.model_copy(update={"trainer": both.trainer.model_copy(update={"groups_per_step": groups})})


def _world(found: Scenario) -> World:
    world = World(found, 0)
    world.observers.append(Watch(lambda: world.machine).saw)
    return world


FIGURES: Final[dict[str, Callable[[argparse.Namespace], dict[str, Any]]]] = {
    "notice": notice,
    "spot": spot,
    "kinds": kinds,
    "join": cluster_real.join,
    "slurm": cluster_real.slurm,
    "ray": cluster_real.ray,
}


def main() -> None:
    if sys.argv[1:2] == ["hosts"]:
        _, _, address, model, first, count = sys.argv
        asyncio.run(cluster_real.be_hosts(address, model, int(first), int(count)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=["notice", "spot", "kinds"])
    parser.add_argument("--hours", type=float, default=2.0, help="of simulated time, for spot")
    parser.add_argument("--hosts", type=int, default=64, help="for join")
    parser.add_argument(
        "--spot-minutes", type=float, default=20.0, help="for slurm and ray, beside as many undisturbed"
    )
    parser.add_argument("--nodes", type=int, default=12, help="for slurm and ray: that run hosts")
    parser.add_argument("--steps", type=int, default=14, help="measured, for kinds")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with collecting_rarely():
        found = {name: FIGURES[name](options) for name in options.only}
    if options.json:
        print(json.dumps(found))
        return
    for name, figures in found.items():
        for title, value in figures.items():
            print(f"{name}: {title.replace('_', ' ')}: {value:,.4g}")


if __name__ == "__main__":
    main()
