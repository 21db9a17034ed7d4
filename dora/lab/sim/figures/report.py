"""The results of a simulated run: one object of numbers, and the timeline for a plot."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Final


@dataclass(frozen=True, slots=True)
class Report:
    """Result of one run over its measured steps (after warm-up). Times are simulated unless the name says otherwise."""

    preset: Annotated[str, "name of the preset, or `custom`"]
    policy: Annotated[str, "the strategy"]
    window: Annotated[int | str, "policy versions that may be live, or `auto`"]
    window_last: Annotated[int | None, "the window in force at the end; null: the strategy knows no versions"]
    window_changes: Annotated[tuple[str, ...], "with `auto`: each change, warm-up included, with its reason"]
    predictor: Annotated[str, "of response lengths"]
    seed: Annotated[int, "seed of prompts and lengths"]
    steps: Annotated[int, "measured steps, after the warm-up"]
    engines: Annotated[int, "workers, one engine each"]
    step_time_min: Annotated[float, "mean time from one publish to the next"]
    rollout_only_fraction: Annotated[
        float, "share of a step in which the trainer waits; colocated: in which it generates"
    ]
    dp_groups_to_add: Annotated[
        int | None,
        "more workers that would let generation keep up; null: the roles take turns, or training takes no time",
    ]
    tokens_per_s: Annotated[float, "prompt and response tokens trained on"]
    generated_tokens_per_s: Annotated[
        float, "response tokens that all engines generate, trained on or not: a service's counter tokens_per_s"
    ]
    staleness_max: Annotated[
        int | None,
        "largest staleness of a group, steps between its version and the step that trained on it; null: a response"
        " of this strategy has several versions",
    ]
    staleness_mean: Annotated[float | None, "mean of the same, or null"]
    staleness_groups: Annotated[tuple[int, ...] | None, "groups by staleness, from 0 on, or null"]
    step_staleness: Annotated[tuple[float, ...] | None, "mean staleness of each step, or null"]
    step_took_min: Annotated[tuple[float, ...], "time of each step, from one publish to the next"]
    step_waited_min: Annotated[
        tuple[float, ...], "of it, the trainer had nothing to train on; colocated: rollout had the accelerators"
    ]
    bound_min: Annotated[
        float, "bubble-free bound: least time to generate an expected batch, of all tasks, on this cluster"
    ]
    bound_consumed_min: Annotated[float, "the same for the batches that were trained on"]
    work_done_over_consumed: Annotated[
        float,
        "engine work generated, over that of the batches trained on: 1 when stationary, above 1 while a run fills "
        "its window, below 1 while it lives on what the warm-up left",
    ]
    kv_utilisation: Annotated[float, "mean share of the KV-cache in use"]
    violations: Annotated[int, "broken promises: always 0, or the command exits with 1"]
    lost: Annotated[int, "groups that vanished: always 0"]
    duplicated: Annotated[int, "groups delivered twice: always 0"]
    filter_fraction: Annotated[float, "as the scenario has it"]
    redundant_fraction: Annotated[float, "as the scenario has it"]
    groups_filtered: Annotated[int, "groups that the filter cancelled, all their responses scored"]
    groups_dropped: Annotated[int, "groups cancelled as redundant, unfinished"]
    tokens_wasted_fraction: Annotated[float, "share of the tokens generated that cancelled groups had"]
    migrations_kv: Annotated[int, "requests that moved with their KV, warm-up included"]
    migrations_reprefill: Annotated[int, "requests whose KV was computed again elsewhere, warm-up included"]
    preemptions: Annotated[int, "requests that an engine preempted as its KV-cache ran out"]
    overhead_balancing: Annotated[float, "share of engine time that loads weights"]
    overhead_transfer: Annotated[float, "share of their time on workers that requests stood still while their KV moved"]
    overhead_reprefill: Annotated[float, "share of engine time that computes KV a second time"]
    recall_longest_20: Annotated[
        float, "share of the longest fifth of responses, of all tasks together, that the predictor ranks there"
    ]
    events: Annotated[int, "events that the core handled, warm-up included"]
    simulated_s: Annotated[float, "simulated time, warm-up included"]
    wall_s: Annotated[float, "time that the simulation took"]
    sim_speedup: Annotated[float, "simulated time over that"]


@dataclass(frozen=True, slots=True)
class BrokenReport:
    """The partial result of a run that a broken promise or an exception ended."""

    preset: Annotated[str, "name of the preset, or `custom`"]
    policy: Annotated[str, "the strategy"]
    window: Annotated[int | str, "policy versions that may be live, or `auto`"]
    predictor: Annotated[str, "of response lengths"]
    seed: Annotated[int, "seed of prompts and lengths"]
    violations: Annotated[int, "broken promises of any kind: 1"]
    lost: Annotated[int, "1 if a group vanished"]
    duplicated: Annotated[int, "1 if a group was delivered twice"]
    stalled: Annotated[int, "1 if the trainer waited in vain"]
    violation: Annotated[str, "what was broken, with the facts"]
    at_s: Annotated[float, "simulated time"]
    events: Annotated[int, "events handled so far"]
    raised: Annotated[bool, "an exception that no check raises, a bug of the strategy or the core: violation names it"]


@dataclass(frozen=True, slots=True)
class Span:
    """A worker hosted one version from ``begin_s`` to ``end_s``. ``version`` -1: loading or none."""

    worker: int
    version: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Arrow:
    """One request's move between two workers."""

    at_s: float
    source: int
    target: int
    version: int


@dataclass(frozen=True, slots=True)
class StepSpan:
    """One trainer step, from the previous publish to its own, with its computing intervals (the rest is waiting)."""

    step: int
    begin_s: float
    end_s: float
    busy: tuple[tuple[float, float], ...]  # intervals of computing
    staleness: tuple[int, ...]  # groups by staleness 0, 1, ...


@dataclass(slots=True)
class Timeline:
    """Events of a run. Every list is in order of time."""

    spans: list[Span] = field(default_factory=list)
    arrows: list[Arrow] = field(default_factory=list)
    steps: list[StepSpan] = field(default_factory=list)
    kv: list[tuple[float, int, float]] = field(default_factory=list)  # (at_s, worker, share of KV in use)


@dataclass(frozen=True, slots=True)
class StepUnit:
    """The unit in which step times are displayed, as a symbol and in words."""

    name: str
    word: str
    seconds: float

    def of_min(self, minutes: float) -> float:
        return minutes * 60.0 / self.seconds


SECONDS: Final = StepUnit("s", "seconds", 1.0)
MINUTES: Final = StepUnit("min", "minutes", 60.0)


def step_unit(times_min: Iterable[float]) -> StepUnit:
    """One unit for all these step times: seconds if the shortest is below a minute."""
    return SECONDS if min(times_min, default=1.0) < 1.0 else MINUTES
