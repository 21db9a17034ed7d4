"""One seed of the sweep: a small cluster with faults, and a check that every promise is kept to the end."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any, Final

from dora.config import BalanceConfig, CostConfig, DoraConfig, WindowConfig
from dora.core import events as on
from dora.core.policies import POLICIES, allows_any, nearest_window
from dora.errors import InvalidValue, one_of
from dora.lab.sim.faults.fault import Fault
from dora.lab.sim.faults.fault_kinds import NOTICE, POOL, SESSION, draw_faults, kinds_of, strike
from dora.lab.sim.faults.unreliable import UnreliableWorld
from dora.lab.sim.invariants import check_empty
from dora.lab.sim.ledger import Failure, Lost, Stalled, Violation, failure_of
from dora.lab.sim.scenario import COST, Cluster, Lengths, Scenario, SimTurns, TrainerPace, Workload
from dora.lab.sim.world import TICK_S

WORKERS_MAX: Final = 4
HORIZON_S: Final = 60  # end of the faults
FAULTS_MEAN: Final = 8.0
DRAWN: Final = "drawn"
WINDOWS: Final = (DRAWN, "auto")
STEPS_AFTER: Final = 2  # steps that must complete after the faults
PATIENCE_S: Final = 1500.0  # time limit of a step, and of each step in the drain
SAME_SIZE: Final = 0.4  # share of the seeds with larger groups in which all members start at once
QUIET_S: Final = 20.0  # after the drain, for events in transit: longer than any fault lasts


@dataclass(frozen=True)
class Trial:
    """The parameters of one trial. ``chosen`` has the indexes of the drawn faults that occur (None for all).
    ``workers`` 0 is as drawn. ``window`` is drawn, constant, or auto.
    """

    seed: int
    policy: str
    kinds: str = "all"
    chosen: tuple[int, ...] | None = None
    workers: int = 0
    steps_after: int = STEPS_AFTER
    window: str = DRAWN

    @property
    def token(self) -> str:
        chosen = "all" if self.chosen is None else ",".join(map(str, self.chosen))
        window = "" if self.window == DRAWN else f":{self.window}"
        return f"{self.seed}:{self.policy}:{self.kinds}:{chosen}:{self.workers}:{self.steps_after}{window}"

    @classmethod
    def of(cls, token: str) -> "Trial":
        """Parses a token. Raises InvalidValue that names the first invalid part."""
        try:
            seed, policy, kinds, chosen, workers, steps_after, *rest = token.split(":")
            (window,) = rest or (DRAWN,)
            indexes = None if chosen == "all" else tuple(int(index) for index in chosen.split(",") if index)
            trial = cls(int(seed), policy, kinds, indexes, int(workers), int(steps_after), window)
        except ValueError as error:
            raise InvalidValue("--replay", token, "a token as `dora simulate sweep` prints it") from error
        trial.check()
        return trial

    def check(self) -> None:
        """Raises InvalidValue for parameters that no sweep has."""
        if self.policy not in POLICIES:
            raise InvalidValue("--replay: policy", self.policy, one_of(self.policy, POLICIES, cutoff=0.6))
        if self.window not in WINDOWS:
            raise InvalidValue("--replay: window", self.window, " or ".join(WINDOWS))
        if self.window != DRAWN and not allows_any(self.policy):
            raise InvalidValue("--replay: window", self.window, f"{DRAWN}: {self.policy} is not defined for every one")
        if self.seed < 0:
            raise InvalidValue("--replay: seed", self.seed, "0 or above")
        if not 0 <= self.workers <= WORKERS_MAX:
            raise InvalidValue("--replay: workers", self.workers, f"0, as drawn, to {WORKERS_MAX}")
        if self.steps_after < 0:
            raise InvalidValue("--replay: steps after the faults", self.steps_after, "0 or above")
        indexes, drawn = self.chosen or (), len(self.drawn)
        if any(not 0 <= index < drawn for index in indexes) or list(indexes) != sorted(set(indexes)):
            allowed = f"all, or some of 0 to {drawn - 1} in order" if drawn else "all, or none"
            shown = ",".join(map(str, indexes))
            raise InvalidValue("--replay: faults", shown, f"{allowed}: seed {self.seed} has {drawn} of {self.kinds}")

    @cached_property
    def drawn(self) -> tuple[Fault, ...]:
        return draw_faults(self.seed, kinds_of(self.kinds), HORIZON_S, FAULTS_MEAN)

    @property
    def faults(self) -> tuple[Fault, ...]:
        return self.drawn if self.chosen is None else tuple(self.drawn[index] for index in self.chosen)

    def run(self) -> Failure | None:
        """Runs the trial. Returns None if every promise was kept after every event."""
        scenario = self.cluster()
        world, service_log = None, logging.getLogger("dora.service")
        was_disabled, service_log.disabled = (
            service_log.disabled,
            True,
        )  # messages to operators about faults, which are all intended
        try:
            world = UnreliableWorld(scenario, self.seed)
            conduct(world, self.faults, self.steps_after)
        except Exception as error:  # any exception of the core is a finding, and the next seed continues
            return failure_of(error, world.now_s if world is not None else 0.0)
        finally:
            service_log.disabled = was_disabled
        return None

    def cluster(self) -> Scenario:
        random = Random(f"cluster {self.seed}")
        workers, window = random.randint(1, WORKERS_MAX), random.randint(1, 4)
        period_s = random.choice((4.0, 7.0, 15.0))
        options = Random(f"options {self.seed}")
        filters, redundant = options.choice((0.0, 0.0, 0.3)), options.choice((0.0, 0.5, 1.0))
        kv_token_s, request_s = options.choice((0.0, 0.0, 3e-4)), options.choice((0.0, 0.0, 0.01))
        cost = COST.model_copy(update={"step_s": 0.08, "kv_token_s": kv_token_s, "request_s": request_s})
        predictor = random.choice(("oracle", "statistics", "ranker"))
        scenario = Scenario(
            name=f"seed {self.seed}",
            window=self._window(window),
            filter_fraction=filters,
            redundant_fraction=redundant,
            cluster=_cluster(random, self.workers or workers, cost, self._pools()),
            trainer=TrainerPace(
                groups_per_step=random.randint(1, 5),
                step_s=random.choice((1.0, 4.0, 8.0)),
                micro_batches=random.randint(1, 3),
                streams=random.random() < 0.7,
                publish_s=random.choice((0.0, 1.0)),
            ),
            workload=Workload(
                prompts=64,
                prompt_tokens=20,
                lengths=Lengths(mu=3.0, sigma=0.8, cap_tokens=120),
                **self._sizes(random.choice((1, 2, 3, 4, 9))),
                **self._turns(random.choice((1, 1, 3))),
            ),
        )
        balance = BalanceConfig(
            policy=self.policy,
            predictor=predictor,
            period_s=period_s,
            handoff_timeout_s=random.choice((3.0, 9.0, 30.0)),
            moves_at_once=random.choice((1, 64)),
            dora=DoraConfig(level_gap=random.choice((1, 2))),
        )
        return scenario.model_copy(update={"balance": balance})

    def _window(self, drawn: int) -> WindowConfig:
        """An adaptive window changes often, so that faults occur before and after a change."""
        if self.window == DRAWN:
            return WindowConfig(size=nearest_window(self.policy, drawn))
        random = Random(f"window {self.seed}")
        least, most = random.choice(((1, 4), (1, 2), (2, 3), (1, 3)))
        return WindowConfig(size="auto", min=least, max=most, look_steps=random.choice((1, 2)), rest_steps=0)

    def _turns(self, most: int) -> dict[str, Any]:
        turns = SimTurns(most=most, environment_mean_s=1.0, answer_tokens=5)
        random = Random(f"sessions {self.seed}")
        if SESSION not in kinds_of(self.kinds) or random.random() < 0.5:
            return {"turns": turns}
        longer = {"most": random.choice((1, 3, 6)), "environment_mean_s": random.choice((0.0, 1.0, 5.0))}
        turns = turns.model_copy(update={**longer, "environment_sigma": 0.7})
        kinds = {"prompts_given": random.random() < 0.4, "forks": random.choice((0.0, 0.3))}
        return {"turns": turns, "sessions": True, **kinds}

    def _sizes(self, most: int) -> dict[str, Any]:
        random, sizes = Random(f"growth {self.seed}"), {"group_size": most}
        if SESSION not in kinds_of(self.kinds) or most < 3 or random.random() < SAME_SIZE:
            return sizes
        return {**sizes, "group_size_min": 2, "settled_fraction": random.choice((0.0, 0.2, 0.8))}

    def _pools(self) -> dict[str, Any]:
        random, kinds = Random(f"pools {self.seed}"), kinds_of(self.kinds)
        hosts = Random(f"hosts {self.seed}").choice((1, 2, 3)) if NOTICE in kinds else 0
        if POOL not in kinds:
            return {"hosts": hosts}
        return {
            "hosts": hosts,
            "pools": random.choice((1, 2)),
            "pool_tokens": random.choice((0, 60, 500)),
            "pool_bytes_per_s": random.choice((50.0, 200.0, 1000.0)),
        }


def _cluster(random: Random, workers: int, cost: CostConfig, pools: dict[str, Any]) -> Cluster:
    """Slots and KV are scarce. A copy may take as long as many tokens, so that other events occur meanwhile.

    If KV or requests cost time, a full engine is much slower, so strategies choose between fast and slow workers.
    """
    return Cluster(
        gpus=workers + 1,
        rollout_gpus=workers,
        gpus_per_engine=1,
        slots=random.choice((2, 6)),
        kv_tokens=random.choice((150, 600)),
        link_latency_s=random.choice((0.02, 0.1, 0.5)),
        kv_token_bytes=1.0,
        link_bytes_per_s=random.choice((20.0, 100.0, 1000.0)),
        load_s=random.choice((0.5, 2.0)),
        cost=cost,
        **pools,
    )


def conduct(world: UnreliableWorld, faults: Sequence[Fault], steps_after: int) -> None:
    """Runs with faults. Then the trainer must complete its next steps, and the drain return every admitted group."""
    for fault in faults:
        world.after(fault.at_s, strike, world, fault)
    world.run_until(lambda: world.now_s >= HORIZON_S)
    goal = world.trainer.committed + steps_after
    _patiently(world, lambda: world.trainer.committed >= goal or world.ending)
    if not world.ending:
        world.end_prompts(world.habits.last_prompts)
    _patiently(world, lambda: world.trainer.ended)
    for evaluation_id in list(world.machine.state.evaluations.running):
        world.ask(on.EvaluationCancelled(evaluation_id, "the run ends"))
    rest_s = world.now_s + QUIET_S
    world.run_until(lambda: world.now_s >= rest_s)
    limit_s = rest_s + world.config.workers.load_timeout_s + TICK_S  # a load that never ends has timed out by then
    world.run_until(lambda: world.now_s >= limit_s or not _loads(world))
    check_books(world)


def _loads(world: UnreliableWorld) -> bool:
    return any(worker.loading >= 0 for worker in world.machine.state.workers.values())


def check_books(world: UnreliableWorld) -> None:
    """Checks after the drain that no group was lost and no process holds one."""
    if world.ledger.groups:
        raise Lost(f"neither trained nor cancelled: {', '.join(world.ledger.groups)} (C2)")
    unended = [evaluation_id for evaluation_id, evaluation in world.ledger.evaluations.items() if not evaluation.ended]
    if unended or world.ledger.responses:
        raise Lost(f"never ended: {', '.join([*unended, *world.ledger.responses])} (C2)")
    check_empty(world.machine.state)
    for worker in (*world.workers.values(), *world.pools.values()):
        if worker.alive and worker.engine.requests:
            raise Violation(f"{worker.worker_id} still holds {', '.join(worker.engine.requests)}")
    if world.snapshots:
        raise Violation(f"snapshots are never released: {', '.join(world.snapshots)}")


def _patiently(world: UnreliableWorld, done: Callable[[], bool]) -> None:
    """Runs until ``done`` while steps are committed. Many prompts may be left, so only each step has a limit."""

    def moved_on(committed: int) -> Callable[[], bool]:
        return lambda: done() or world.trainer.committed > committed

    try:
        while not done():
            world.run_until(moved_on(world.trainer.committed), world.now_s + PATIENCE_S)
    except Stalled as error:
        raise Stalled(f"{error}: {describe(world)}") from error


def describe(world: UnreliableWorld) -> str:
    state = world.machine.state
    waiting = {version: len(rows) for version, rows in state.waiting.items() if rows}
    workers = ", ".join(
        f"{w.worker_id} loaded {w.loaded} target {w.target} loading {w.loading} held {w.assigned}"
        + " draining" * w.draining
        for w in state.workers.values()
    )
    return (
        f"newest {state.window.newest}, {state.window.summary()}, waiting {waiting}, "
        f"backlog {len(state.backlog)}, drawing {state.drawing}, handoffs {len(state.handoffs)}, workers: {workers}"
    )
