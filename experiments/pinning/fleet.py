"""A fleet under agents' traffic, in the package's simulator: pinned by the default strategy, or under another regime.

Sessions are as vLLM #57103 publishes them: a median of 43 turns, 142,000 tokens in and 444 out a turn, prefix hits of
96% and subagents in 44%, which are branches here. Turns are drawn evenly from 1 to 85. Model and engine are assumed: a
mixture of experts with latent attention on eight accelerators of 141 GB. Eight steps follow three that are not counted.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Final, get_args

from dora.config import SessionsConfig, merged
from dora.core import commands as do
from dora.core import events as on
from dora.lab.sim.ledger import SimGroup, Stalled
from dora.lab.sim.partial import NAME as MIXED
from dora.lab.sim.scenario import Scenario
from dora.lab.sim.world import World
from experiments.pinning.cell import Rule

TURNS: Final = 43  # of a median session
STEP_S: Final = 350.0  # of training
GROUPS: Final = 4
RULES: Final[tuple[Rule, ...]] = get_args(Rule)
WINDOWS: Final = (1, 2, 3, 4)
WIDE: Final = 6  # a window of *pinned* alone, for the staleness that the oldest sessions of the others reach
ROWS: Final = tuple((rule, size) for rule in RULES for size in (*WINDOWS, *((WIDE,) if rule == "pinned" else ())))
WARMUP, STEPS = 3, 8
LIMIT_S: Final = 60 * STEP_S  # without a step: it stands still

SCENARIO: Final[dict[str, Any]] = {
    "name": "agents",
    "balance": {"policy": "laxity", "predictor": "statistics"},
    "cluster": {
        "gpus": 48,
        "rollout_gpus": 32,
        "gpus_per_engine": 8,
        "slots": 64,
        "kv_tokens": 5_000_000,
        "kv_token_bytes": 70_000.0,
        "gpu_memory_bytes": 141e9,
        "weights_bytes": 700e9,
        "pools": 4,
        "pool_tokens": 10_000_000,
        "load_s": 5.0,
        "cost": {
            "kv_token_s": 3e-9,
            "weights_s": 1e-2,
            "request_s": 5e-5,
            "step_s": 1.5e-2,
            "prefill_token_s": 1.2e-5,
        },
    },
    "trainer": {"groups_per_step": GROUPS, "step_s": STEP_S, "micro_batches": GROUPS},
    "workload": {
        "group_size": 4,
        "prompts": 4000,
        "prompt_tokens": 2_000,
        "sessions": True,
        "forks": 0.0134,  # 44% of median sessions have a branch
        "lengths": {"mu": 9.857, "sigma": 0.8, "cap_tokens": 80_000},  # a median of 43 x 444 sampled tokens
        "turns": {"most": 2 * TURNS - 1, "environment_sigma": 1.0, "answer_tokens": 6_060},
    },
}


@dataclass(frozen=True, slots=True)
class Run:
    """One simulated fleet. ``pause``: the tools' time in a median session, in steps of training."""

    rule: Rule
    window: int
    pause: float
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.rule.replace(' ', '')}-w{self.window}-p{self.pause:g}-s{self.seed}"

    @property
    def scenario(self) -> Scenario:
        workload = {"turns": {"environment_mean_s": self.pause * STEP_S / TURNS}}
        changes: dict[str, Any] = {"window": {"size": self.window}, "workload": workload}
        if self.rule != "pinned":  # at most as many groups beyond those trained on
            changes |= {"balance": {"policy": MIXED}, "in_flight_groups": self.window * GROUPS}
        return Scenario.model_validate(merged(SCENARIO, changes))

    @property
    def specification(self) -> dict[str, Any]:
        """As it reads in a result, without defaults: a setting that the simulator gets later makes no other run."""
        scenario = self.scenario.model_dump(mode="json", exclude_defaults=True)
        return {**asdict(self), "scenario": scenario}


class Fleet(World):
    """A world whose trainer's commit does with running sessions what the rule says."""

    session_limits = SessionsConfig(idle_timeout_s=0.0, total_timeout_s=0.0)

    def __init__(self, run: Run) -> None:
        self.run, self.began_at = run, dict[str, int]()  # request -> steps trained when it began
        self.wasted = self.discarded = 0
        self.lines: list[dict[str, float]] = []
        super().__init__(run.scenario, run.seed)
        self.observers.append(self._note)
        self.trainer.on_step = self._step

    def _note(self, _now_s: float, _event: on.Event, commands: list[do.Command]) -> None:
        for command in commands:
            if isinstance(command, do.AdmitGroup):
                self.began_at |= dict.fromkeys(self.ledger.groups[command.group_id].request_ids, self.trainer.committed)
            elif isinstance(command, do.ReplaceRequest):
                self.began_at[command.replacement_id] = self.trainer.committed

    def _step(self, step: int, began_s: float, ended_s: float, groups: list[SimGroup], busy: Any) -> None:
        ages = [step - self.began_at[each] for group in groups for each in group.request_ids]
        engines = [worker.engine.totals for worker in self.workers.values()]
        self.lines.append({
            "took_s": ended_s - began_s,
            "staleness": fmean(ages),
            "oldest": max(ages),
            "sampled": sum(each.generated_tokens for each in engines),
            "again_s": sum(each.reprefill_s for each in engines),
            "wasted": self.wasted,
            "discarded": self.discarded,
        })  # fmt: skip

    def renew(self) -> None:
        """Loads the new weights under running sessions. Called for all rules but *pinned*."""
        if self.run.rule == "computed again":
            super().renew()
            return
        for worker in self.workers.values():
            worker.engine.advance(self.now_s)
            worker.engine.debt_s += self.scenario.cluster.load_s
            self.wake_later(worker)
        if self.run.rule.startswith("discarded"):
            age = 0 if self.run.rule == "discarded at an update" else self.run.window
            for request_id, response in list(self.ledger.responses.items()):
                is_over = response.finished or response.ended or response.troubled
                if not is_over and self.trainer.committed - self.began_at[request_id] >= age:
                    spans = response.prompt.spans(response.index)
                    self.wasted += sum(max(0, min(response.tokens, end) - begin) for begin, end in spans)
                    self.discarded += 1
                    response.troubled = True
                    self.post(on.SessionFailed(request_id, self.run.rule, "another"))


def runs() -> Iterator[Run]:
    """Yields the runs; what the page needs most comes first."""
    for pause in (1.0, 10.0, 3.0, 0.1):
        yield from (Run(rule, window, pause) for rule, window in ROWS)


def simulated(run: Run) -> dict[str, Any]:
    """The means over the counted steps; ``stalled`` if no step ended in LIMIT_S."""
    fleet = Fleet(run)
    try:
        for step in range(WARMUP + STEPS):
            fleet.run_until(lambda: len(fleet.lines) > step, fleet.now_s + LIMIT_S)  # noqa: B023
    except Stalled:
        return {"run": run.specification, "stalled": True, "steps": len(fleet.lines)}
    first, last, counted = fleet.lines[WARMUP - 1], fleet.lines[-1], fleet.lines[WARMUP:]
    more = {name: last[name] - first[name] for name in ("sampled", "again_s", "wasted", "discarded")}
    return {
        "run": run.specification,
        "stalled": False,
        "step_s": fmean(line["took_s"] for line in counted),
        "staleness": fmean(line["staleness"] for line in counted),
        "oldest": max(line["oldest"] for line in counted),
        "wasted": more["wasted"] / more["sampled"],
        "again": more["again_s"] / run.scenario.cluster.cost.prefill_token_s / more["sampled"],
        "discarded": more["discarded"] / STEPS,
    }
