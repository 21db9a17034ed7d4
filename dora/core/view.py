"""What a plan is made from: the core's state at one moment, as columns. A policy may read it and write none of it."""

from collections.abc import Mapping
from dataclasses import dataclass

from dora.core.forecast.cost import CostModel
from dora.core.forecast.lognormal import expected_remaining, running_chance
from dora.core.table import Column


@dataclass(frozen=True, slots=True)
class WorkerColumns:
    """One entry a worker index; entries where ``alive`` is False are indexes without a worker."""

    alive: Column  # bool
    loaded: Column  # int64, version in memory, -1: none
    target: Column  # int64, version it is to host, -1: none
    draining: Column  # bool: is to leave
    slots: Column  # int64
    held: Column  # int64: requests it owns or that are on their way to it
    kv_tokens: Column  # int64, capacity
    kv_claimed: Column  # int64, prompts + expected lengths of what it holds
    kv_expected: Column  # int64: in use once all that was sent has arrived
    kv_used: Column  # int64, as last reported
    waiting: Column  # int64, queued inside the engine, as last reported


@dataclass(frozen=True, slots=True)
class RequestColumns:
    """One entry a row of the request table; rows where ``unfinished`` is False mean nothing."""

    unfinished: Column  # bool
    movable: Column  # bool: on a worker, in no handoff, not resting from a failed one
    version: Column  # int64
    worker: Column  # int64 index, -1: waiting for one
    prompt_tokens: Column  # int64
    tokens: Column  # int64, response tokens so far
    expected_tokens: Column  # int64, of the whole response, as predicted before it began
    max_tokens: Column  # int64, at which a response is cut
    log_mean: Column  # float64, belief about a response's log tokens
    log_sd: Column  # float64, 0 where the length is known

    def runs_on(self, rows: Column, ahead_tokens: Column) -> Column:
        """The chance that these run on for so many more tokens: 0 or 1 where lengths are known. (rows, ahead)."""
        tokens = self.tokens[rows]
        belief = (self.log_mean[rows], self.log_sd[rows])
        return running_chance(self.expected_tokens[rows] - tokens, *belief, tokens, self.max_tokens[rows], ahead_tokens)

    def remaining_tokens(self, rows: Column) -> Column:
        """Tokens that these have still to come, as expected; float64. Worked out where asked for: it takes long."""
        belief = (self.log_mean[rows], self.log_sd[rows])
        return expected_remaining(self.expected_tokens[rows], *belief, self.tokens[rows], self.max_tokens[rows])


@dataclass(frozen=True, slots=True)
class View:
    now_s: float
    step: int
    newest: int
    window: int
    groups_per_step: int  # that a step takes; 0: not known yet
    admissible: Mapping[int, int]  # version -> groups that may still be admitted
    cost: CostModel | None  # of one engine, where it was profiled
    group_tokens: float  # predicted tokens of one new group
    group_kv_tokens: float  # KV of one new group, prompts too, all of it at its end; 0: no group is known
    backlog_longest: Column  # float64, ascending: predicted longest response of each prompt on offer
    workers: WorkerColumns
    requests: RequestColumns
    pools: tuple[int, ...] = ()  # KV in tokens that each pool has room for; (): there is no pool

    def admits(self, version: int) -> bool:
        """Whether the window lets this version begin another group."""
        return self.admissible.get(version, 0) >= 1
