"""The view from which a plan is made: the core's state at one moment, as columns. Policies must not write to it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dora.core.forecast.cost import CostModel
from dora.core.forecast.lognormal import expected_remaining, running_chance
from dora.core.table import Column


@dataclass(frozen=True, slots=True)
class WorkerColumns:
    """One entry a worker index; entries with ``alive`` False have no worker."""

    alive: Column  # bool
    loaded: Column  # int64, version in memory, -1: none
    target: Column  # int64, version to host, -1: none
    draining: Column  # bool: will leave
    slots: Column  # int64
    assigned: Column  # int64: requests that it owns or that are on their way to it
    kv_tokens: Column  # int64, capacity
    kv_claimed: Column  # int64, prompts and expected lengths of its requests
    kv_expected: Column  # int64: in use once everything on its way has arrived
    kv_used: Column  # int64, as last reported
    waiting: Column  # int64, queued inside the engine, as last reported
    step_scale: Column  # float64, duration of a step as a multiple of ``View.cost``'s
    zone: Column  # int64, index of its zone in ``View.zones``


@dataclass(frozen=True, slots=True)
class RequestColumns:
    """One entry a row of the request table; rows with ``unfinished`` False are meaningless."""

    unfinished: Column  # bool
    movable: Column  # bool: on a worker, in no handoff, not pausing after a failed one
    version: Column  # int64
    worker: Column  # int64 index, -1: waits for one, or for its next turn
    prompt_tokens: Column  # int64
    tokens: Column  # int64, response tokens so far
    expected_tokens: Column  # int64, of the whole response, as predicted at its admission
    max_tokens: Column  # int64, at which a response is cut
    log_mean: Column  # float64, belief about the logarithm of a response's tokens
    log_sd: Column  # float64, 0: the length is known

    def runs_on(self, rows: Column, ahead_tokens: Column) -> Column:
        """The chance of these responses to reach so many more tokens: 0 or 1 if lengths are known. (rows, ahead)."""
        tokens = self.tokens[rows]
        belief = (self.log_mean[rows], self.log_sd[rows])
        return running_chance(self.expected_tokens[rows] - tokens, *belief, tokens, self.max_tokens[rows], ahead_tokens)

    def remaining_tokens(self, rows: Column) -> Column:
        """The expected remaining tokens of these responses; float64. Computed on each call, which takes long."""
        belief = (self.log_mean[rows], self.log_sd[rows])
        return expected_remaining(self.expected_tokens[rows], *belief, self.tokens[rows], self.max_tokens[rows])


@dataclass(frozen=True, slots=True)
class View:
    now_s: float
    step: int
    newest: int
    window: int
    groups_per_step: int  # 0: unknown
    admissible: Mapping[int, int]  # version -> groups that may still be admitted
    cost: CostModel | None  # of one engine, if it was profiled
    group_tokens: float  # predicted tokens of one new group
    group_kv_tokens: float  # KV of one new group at its end, prompts included; 0: unknown
    backlog_longest: Column  # float64, ascending: predicted longest response of each offered prompt
    workers: WorkerColumns
    requests: RequestColumns
    state_tokens: int = 0  # room of a request's state in a pool, beside its context
    zones: tuple[str, ...] = ("",)  # a host of each zone
    crosses: Callable[[str, str, float], bool] = lambda one, other, kv_tokens: True  # see Places.crosses
    pools: tuple[int, ...] = ()  # room of each pool in tokens of KV; (): there is no pool

    def admits(self, version: int) -> bool:
        return self.admissible.get(version, 0) >= 1
