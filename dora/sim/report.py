"""What a simulated run says: one object of numbers, and the timeline behind a plot."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Report:
    """Result of one run over its measured steps (after warm-up). Times are simulated unless the name says otherwise."""

    preset: str
    policy: str
    window: int
    predictor: str
    seed: int
    steps: int  # measured
    engines: int
    step_time_min: float  # mean between publishes
    rollout_only_fraction: float  # share of a step in which the trainer waits (colocated: the rollout phase)
    dp_groups_to_add: int | None  # that would let generation keep up; None: training takes turns with it, or no time
    tokens_per_s: float  # prompt and response tokens trained on, over time
    generated_tokens_per_s: float  # response tokens of all engines, over time: a service's tokens_per_s
    staleness_max: int | None  # None: the strategy lets a response have several versions
    staleness_mean: float | None
    bound_min: (
        float  # bubble-free step time of this cluster on this workload (facts: engine time >= k1 C + k3 N + k4 S)
    )
    bound_consumed_min: float  # the same for the batches really consumed
    work_done_over_consumed: float  # engine work generated over that of the consumed batches; 1: stationary
    kv_utilisation: float  # mean share of KV in use
    violations: int
    lost: int
    duplicated: int
    filter_fraction: float  # as in the scenario
    redundant_fraction: float
    groups_filtered: int  # cancelled by the user's filter, all their responses scored
    groups_dropped: int  # cancelled as redundant, unfinished
    tokens_wasted_fraction: float  # of the tokens generated: those the service had of groups that were cancelled then
    migrations_kv: int
    migrations_reprefill: int
    preemptions: int
    overhead_balancing: float  # share of engine time loading weights (and planning)
    overhead_transfer: float  # share of their time on workers that requests stood still while their KV moved
    overhead_reprefill: float  # share of engine time spent computing KV a second time
    recall_longest_20: float  # of the predictor: share of the longest 20% that it ranks among the longest 20%
    events: int
    simulated_s: float
    wall_s: float
    sim_speedup: float  # simulated_s / wall_s


@dataclass(frozen=True, slots=True)
class BrokenReport:
    """A run that ended because a promise was broken, or an exception raised: what is left to say of it."""

    preset: str
    policy: str
    window: int
    predictor: str
    seed: int
    violations: int  # broken promises of any kind; of which:
    lost: int
    duplicated: int
    stalled: int
    violation: str  # the first, with the facts
    at_s: float  # simulated
    events: int
    raised: bool  # an exception that no check raises, a bug of the strategy or the core: ``violation`` names it


@dataclass(frozen=True, slots=True)
class Span:
    """One DP group hosted one version from ``begin_s`` to ``end_s``. ``version`` -1: loading or none."""

    worker: int
    version: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Arrow:
    """One request moved between two DP groups."""

    at_s: float
    source: int
    target: int
    version: int


@dataclass(frozen=True, slots=True)
class StepSpan:
    """One trainer step: from the publish before it to its own, and when it computed (the rest is waiting)."""

    step: int
    begin_s: float
    end_s: float
    busy: tuple[tuple[float, float], ...]  # intervals of computing
    staleness: tuple[int, ...]  # groups by staleness 0, 1, ...


@dataclass(slots=True)
class Timeline:
    """Collected while a run goes on; every list is in order of time."""

    spans: list[Span] = field(default_factory=list)
    arrows: list[Arrow] = field(default_factory=list)
    steps: list[StepSpan] = field(default_factory=list)
    kv: list[tuple[float, int, float]] = field(default_factory=list)  # (at_s, worker, share of KV in use)
