"""The whole state of the core. The modules in rules/ are functions over it."""

from collections import ChainMap, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from dora.config import Config
from dora.core.commands import Command, RejectVersion, WorkerCommand
from dora.core.fleet.hosting import Hosting
from dora.core.fleet.loads import Loads
from dora.core.fleet.places import Places
from dora.core.fleet.pool import Pool
from dora.core.fleet.worker import Worker
from dora.core.forecast.adaptive import AdaptiveSize
from dora.core.forecast.cost import CostModel
from dora.core.forecast.pauses import Pauses
from dora.core.forecast.prediction import PREDICTORS, PromptTraits
from dora.core.forecast.rates import Rates
from dora.core.groups.evaluations import RunningEvaluations
from dora.core.groups.freshness import Freshness
from dora.core.groups.queues import Backlog, WaitingRequests
from dora.core.groups.window import Window
from dora.core.handoff.choice import TYPICAL
from dora.core.handoff.table import Handoff
from dora.core.table import Column, Table
from dora.core.worklist import Worklist


class RequestStatus(IntEnum):
    """0 marks a free row."""

    WAITING = 1  # admitted, on no worker; it may be parked
    RUNNING = 2  # owned by a worker
    FINISHED = 3  # complete, being scored
    SCORED = 4
    IDLE = 5  # a session between two turns; its KV is on a worker (resident), in a pool (parked) or nowhere (cold)
    DORMANT = 6  # starts if the rewards of its group differ (rules/growth.py)
    SKIPPED = 7  # never started: the rewards of its group do not differ


# plain integers: numpy takes sixty times as long to compare a cell with a member of an enumeration
WAITING, RUNNING, FINISHED, SCORED, IDLE, DORMANT, SKIPPED = map(int, RequestStatus)


class GroupStatus(IntEnum):
    OPEN = 1  # some response is unfinished or unscored
    FINISHED = 2  # waits for a step
    LEASED = 3  # taken by the uncommitted step


OPEN, GROUP_FINISHED, LEASED = map(int, GroupStatus)


@dataclass(frozen=True, slots=True)
class Pending:
    """A command to a worker without an outcome yet."""

    command: WorkerCommand
    handoff: Handoff | None = None
    sent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """A worker's refusal of a version's weights, with its epoch."""

    epoch: int
    reason: str
    canary_difference: float  # largest of a logprob; 0 if none was compared


@dataclass(slots=True)
class SuspectVersion:
    """A version that a worker has refused and none has loaded well."""

    refusals: dict[str, Refusal] = field(default_factory=dict)  # by worker id
    second: str = ""  # the one worker that may try it now; empty: there is none


@dataclass(slots=True)
class Notice:
    """A host's time to leave, on the core's clock, and why it leaves."""

    deadline_s: float
    cause: str


@dataclass(slots=True)
class Lease:
    """The attached trainer's hold on its step. rules/lease.py has the rules."""

    commits: int = 0
    turn_s: float = 0.0  # time in which the service has waited for the trainer alone, since its last progress
    longest_s: float = 0.0  # longest such time, fading; 0: unknown
    looked_s: float = 0.0  # time of the last tick
    lapsed: str = ""  # why another trainer may attach unasked; empty: none may


@dataclass(slots=True)
class Counters:
    """Counts since the start, shown to operators."""

    prompts_cancelled: int = 0  # cancelled before admission
    groups_admitted: int = 0
    groups_taken: int = 0
    groups_trained: int = 0
    groups_cancelled: int = 0
    groups_redundant: int = 0  # of these, dropped because their step had enough
    migrations_kv: int = 0
    migrations_reprefill: int = 0
    migrations_failed: int = 0  # undone: refused, timed out, a worker lost
    migrations_overtaken: int = 0  # the response ended first
    requests_orphaned: int = 0
    requests_parked: int = 0  # into a pool
    requests_resumed: int = 0  # from a pool, with their KV
    parked_lost: int = 0  # lost or dropped by a pool, or impossible to resume: re-prefilled
    turns_ended: int = 0  # of sessions
    turns_resumed: int = 0  # next turns that began where the KV was, or after its move
    turns_forked: int = 0  # turns that left the branch of their session
    turns_reprefilled: int = 0  # next turns that began without KV
    members_started_late: int = 0  # of groups that grew, as their rewards differ
    members_skipped: int = 0  # of groups that were settled without them
    sessions_replaced: int = 0
    sessions_broken_off: int = 0  # ended by a time limit or after too many failures
    workers_lost: int = 0
    hosts_noticed: int = 0  # hosts that were to leave by a deadline
    stalls: int = 0  # workers and pools replaced because they reported and made no progress
    leases_lapsed: int = 0  # of trainers that held a step and made no progress
    loads_failed: int = 0
    versions_rejected: int = 0
    staleness_max: int = 0
    versions_live_max: int = 0
    rebalances: int = 0
    c1_violations: int = 0


class State:
    """The core's whole state. ``out`` collects the commands of the present event."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.window = Window(config.window.least, config.window.groups_per_step)
        self.adaptive = AdaptiveSize(config.window) if config.window.is_adaptive else None
        self.predictor = PREDICTORS[config.balance.predictor]()
        self.cost = CostModel.of(config.balance.cost) if config.balance.cost is not None else None
        self.places = Places(self.cost, TYPICAL)
        self.rates = Rates()
        self.freshness = Freshness(config.window.freshness)
        self.state_tokens = self.cost.state_tokens if self.cost is not None else 0
        self.out: list[Command] = []
        self.now_s = 0.0
        # prompts
        self.backlog = Backlog()
        self.drawing = 0
        self.exhausted = False
        # groups and requests: numpy columns, names beside them
        self.groups = Table(
            {
                "status": np.int8,
                "version": np.int64,
                "deadline": np.int64,  # the last step that may train on it, set at its admission
                "at_once": np.int64,  # members that started with it
                "unfinished": np.int64,  # of the members that have started
                "unscored": np.int64,  # likewise
                "admitted_s": np.float64,
            }
        )
        self.group_id: dict[int, str] = {}
        self.group_row: dict[str, int] = {}
        self.members: dict[int, list[int]] = {}  # group row -> request rows
        self.requests = Table(
            {
                "status": np.int8,
                "group": np.int64,
                "version": np.int64,
                "worker": np.int64,  # index + 1, so that 0 is none
                "pool": np.int64,  # likewise the pool that has its KV while it waits or resumes
                "prompt_tokens": np.int64,
                "tokens": np.int64,
                "max_tokens": np.int64,
                "log_mean": np.float64,  # belief on the response's length: a lognormal's parameters
                "log_sd": np.float64,
                "expected": np.int64,  # its mean
                "placed_s": np.float64,  # start of its present segment, and its tokens then
                "placed_tokens": np.int64,
                "claim": np.int64,  # at its worker, or at its pool
                "claim_inbound": np.int64,  # claimed at the target of its handoff
                "moving": np.bool_,
                "moves": np.int64,
                "starting": np.int64,  # its StartRequest, until obeyed: earlier reports concern an earlier segment
                "rests_until_s": np.float64,  # a move of it failed: not planned again before then
                "session": np.bool_,  # an environment ends it
                "input_tokens": np.int64,  # of ``tokens``: the newest turn's inputs, until a worker has them
                "left": np.int64,  # of a fork: the KV of the branch that it leaves, until a worker has its inputs
                "began_s": np.float64,  # sessions: start of the first turn; 0: not yet
                "idle_s": np.float64,  # sessions: end of the last turn
                "paused_s": np.float64,  # sessions: time between turns so far
                "attempt": np.int64,  # sessions: number of replacements before it
                "spared": np.int64,  # sessions: of these, those for the fault of another since the service's start
            }
        )
        self.request_id: dict[int, str] = {}
        self.request_row: dict[str, int] = {}
        self.undecided: dict[int, tuple[float, ...]] = {}  # group row with dormant members -> its valid reward, if any
        self.traits: dict[int, PromptTraits] = {}  # group row -> traits that lengths are predicted from
        self.waiting: dict[int, WaitingRequests] = {}  # version -> request rows that wait to run
        self.idle: dict[int, set[int]] = {}  # version -> rows of idle sessions; no empty entries
        self.waiting_turns_at: set[int] = set()  # indexes of workers with asked sessions
        self.pauses = Pauses()
        self.finished: dict[int, deque[int]] = {}  # deadline -> group rows that wait for a step; no empty entries
        self.evaluations = RunningEvaluations()  # apart from all of these
        # trainer
        self.trainer_epoch = 0
        self.lease = Lease()
        self.stream_step: int | None = None  # the step with an open stream
        self.leased: list[int] = []  # group rows taken by the uncommitted step
        self.short_step = -1  # the step that ended short because prompts ran out
        self.step_disturbed = False  # its times do not count: a trainer has attached again, or weights were republished
        self.retired = 0  # lower versions are retired, but for those that are pinned
        self.pinned: set[int] = set()  # retired versions that evaluations still run under (rules/evaluation.py)
        # versions by host, for hosts with a store of their own (rules/arrival.py)
        self.arrived: dict[str, set[int]] = {}
        self.missing: set[int] = set()  # stored versions that the service's own store lacks
        self.notices: dict[str, Notice] = {}  # hosts that leave by a deadline (rules/notice.py)
        # results of loads (rules/rejection.py)
        self.proven: set[int] = set()  # stored versions that a worker has loaded well
        self.suspects: dict[int, SuspectVersion] = {}  # version -> its refusals
        self.rejected: dict[int, RejectVersion] = {}  # version -> reason, until it is published again
        self.unavailable: dict[int, str] = {}  # stored versions without weights on any host -> reason
        self.to_republish: set[int] = set()  # versions rejected since the last commit and not republished
        self.full_precision_from = -1  # the first version sampled so by a fallback (rules/precision.py); -1: none
        self.replan = False  # the set of loadable versions has changed: the next plan is due at once
        # workers and handoffs
        self.workers: dict[str, Worker] = {}
        self.worker_list: list[Worker | None] = []
        self.pools: dict[str, Pool] = {}
        self.pool_list: list[Pool | None] = []
        self.handoffs: dict[int, Handoff] = {}  # request row -> live handoff
        self.pending: dict[int, Pending] = {}
        self.hosting = Hosting()
        self.loads = Loads()
        self.worklist = Worklist()
        # ids
        self.commands_sent = 0
        self.groups_named = 0
        self.counters = Counters()

    # ------------------------------------------------------------------------------------------------ small readings

    def owner(self, row: int) -> Worker | None:
        index = int(self.requests["worker"][row]) - 1
        return self.worker_list[index] if index >= 0 else None

    def reported(self, worker: Worker, rows: Column) -> Column:
        """Marks the rows of a worker's report whose tokens count; bool (rows,).

        A row counts only after its StartRequest was obeyed: until then its tokens are of an earlier segment of the
        request on this worker, or of another request that had the row.
        """
        requests = self.requests
        taken: Column = (requests["worker"][rows] == worker.index + 1) & (requests["starting"][rows] == 0)
        if worker.kept:  # their last report was taken
            taken &= requests["status"][rows] == RUNNING
        return taken

    def worker_at(self, worker_id: str, epoch: int) -> Worker | None:
        """The live worker with this id and epoch, or None if either has ended."""
        worker = self.workers.get(worker_id)
        return worker if worker is not None and worker.epoch == epoch else None

    def end(self, name: str) -> Worker | Pool | None:
        """The live worker or pool with this id: an end of a handoff."""
        return self.workers.get(name) or self.pools.get(name)

    def pool_of(self, row: int) -> Pool | None:
        """The pool that has the KV of a request without a worker."""
        index = int(self.requests["pool"][row]) - 1
        return self.pool_list[index] if index >= 0 else None

    def pool_with(self, kv_tokens: int, host: str) -> Pool | None:
        """The pool for so much KV of this host: its own, else the one with the most room in its zone, else in a zone
        that KV crosses to; or None.
        """
        fit = (pool for pool in self.pools.values() if pool.free >= kv_tokens)
        fit = (pool for pool in fit if self.places.crosses(host, pool.host, kv_tokens))

        def preference(pool: Pool) -> tuple[bool, bool, int, int]:
            return pool.host == host, self.places.are_near(host, pool.host), pool.free, -pool.index

        return max(fit, key=preference, default=None)

    def names(self) -> Mapping[int, str]:
        """The ids of all requests by row, including those of evaluations."""
        if not self.evaluations.at:
            return self.request_id
        return self.request_id | {row: request.request_id for row, request in self.evaluations.at.items()}

    def rows(self) -> Mapping[str, int]:
        """The rows of all requests by id, including those of evaluations."""
        return ChainMap(self.request_row, self.evaluations.row_of) if self.evaluations.row_of else self.request_row

    def keeps_weights(self, version: int) -> bool:
        """Returns whether the weights of a version may still be loaded: a step or an evaluation needs them."""
        return version >= self.window.oldest_kept or version in self.pinned

    def workers_of(self, version: int) -> Sequence[Worker]:
        return self.hosting.workers_of(version)

    # --------------------------------------------------------------------------------------------------- small writes

    def rehosted(self, worker: Worker) -> None:
        """Notes a change of the version that this worker hosts or will host."""
        self.hosting.moved(worker.index, self.worker_list[worker.index])
        self.worklist.changed(worker.index)

    def uses(self, worker: Worker, kv_tokens: int) -> None:
        worker.kv_used, worker.kv_change = kv_tokens, 0
        self.loads.changed(worker.index)
        self.worklist.fills(worker.index, kv_tokens > self.config.balance.pressure * worker.kv_tokens)

    def command_id(self) -> int:
        self.commands_sent += 1
        return self.commands_sent

    def send(self, command: WorkerCommand, handoff: Handoff | None = None) -> None:
        """Sends a command to a worker and expects its outcome."""
        self.pending[command.command_id] = Pending(command, handoff, self.now_s)
        self.out.append(command)  # type: ignore[arg-type]  # every subclass is a Command

    def send_first(self, command: WorkerCommand) -> None:
        """Sends a command before all others of this event."""
        self.pending[command.command_id] = Pending(command, sent_s=self.now_s)
        self.out.insert(0, command)  # type: ignore[arg-type]

    def add_worker(self, worker: Worker) -> None:
        if worker.index == len(self.worker_list):
            self.worker_list.append(worker)
        else:
            self.worker_list[worker.index] = worker
        self.workers[worker.worker_id] = worker
        self.loads.changed(worker.index)
        self.rehosted(worker)

    def remove_worker(self, worker: Worker) -> None:
        del self.workers[worker.worker_id]
        self.worker_list[worker.index] = None
        self.worklist.fills(worker.index, False)
        self.waiting_turns_at.discard(worker.index)
        self.loads.changed(worker.index)
        self.rehosted(worker)

    def free_index(self) -> int:
        return _free_index(self.worker_list)

    def answers_no_more(self, name: str, epoch: int) -> None:
        """Forgets pending commands of an ended epoch of a worker or pool."""
        ended = [
            number
            for number, pending in self.pending.items()
            if pending.command.worker_id == name and pending.command.epoch == epoch
        ]
        for number in ended:
            del self.pending[number]

    def add_pool(self, pool_id: str, epoch: int, kv_tokens: int, host: str) -> Pool:
        pool = self.pools[pool_id] = Pool(pool_id, epoch, _free_index(self.pool_list), kv_tokens, host)
        self.pool_list[pool.index : pool.index + 1] = [pool]
        return pool

    def remove_pool(self, pool: Pool) -> None:
        del self.pools[pool.pool_id]
        self.pool_list[pool.index] = None

    def wait_first(self, row: int) -> None:
        """Queues a request before those of its version that have not begun."""
        self.requests["status"][row] = RequestStatus.WAITING
        self.waiting.setdefault(int(self.requests["version"][row]), WaitingRequests()).push_first(row)
        self.worklist.wake()

    def park(self, row: int, pool: Pool, kv_tokens: int) -> None:
        """Notes that the pool has the KV of a request without a worker."""
        self.requests["pool"][row] = pool.index + 1
        self.requests["claim"][row] = kv_tokens
        pool.rows.add(row)
        pool.kv_claimed += kv_tokens

    def unpark(self, row: int) -> Pool:
        pool = self.pool_of(row)
        assert pool is not None, f"request {self.request_id[row]} is in no pool"
        pool.rows.discard(row)
        pool.refused.discard(row)
        pool.kv_claimed -= int(self.requests["claim"][row])
        self.requests["pool"][row] = self.requests["claim"][row] = 0
        return pool

    def give(self, row: int, worker: Worker) -> None:
        requests = self.requests
        tokens, prompt_tokens = int(requests["tokens"][row]), int(requests["prompt_tokens"][row])
        claim = prompt_tokens + max(tokens, int(requests["expected"][row]))
        requests["status"][row] = RequestStatus.RUNNING
        requests["placed_s"][row], requests["placed_tokens"][row] = self.now_s, tokens
        requests["worker"][row] = worker.index + 1
        requests["claim"][row] = claim
        requests["starting"][row] = 0
        if not requests["began_s"][row]:
            requests["began_s"][row] = self.now_s
        worker.rows.add(row)
        self.worklist.assigned(worker.index)
        self.loads.changed(worker.index)
        worker.kv_claimed += claim
        worker.kv_change += prompt_tokens + tokens

    def give_all(self, rows: Sequence[int], worker: Worker, held: Sequence[int]) -> None:
        """Makes a reattached worker the owner of its requests; ``held`` has its response tokens of each.

        Tokens that it has not reported yet were generated before, so they do not count for its pace.
        """
        requests, indexes = self.requests, np.array(rows, np.int64)
        context = requests["prompt_tokens"][indexes] + requests["tokens"][indexes]
        claims = np.maximum(context, requests["prompt_tokens"][indexes] + requests["expected"][indexes])
        requests["status"][indexes] = RequestStatus.RUNNING
        requests["placed_s"][indexes], requests["placed_tokens"][indexes] = self.now_s, held
        requests["worker"][indexes], requests["claim"][indexes] = worker.index + 1, claims
        requests["starting"][indexes] = requests["input_tokens"][indexes] = requests["left"][indexes] = 0
        worker.rows.update(rows)
        worker.kv_claimed += int(claims.sum())
        worker.kv_change += int(context.sum())
        self.worklist.assigned(worker.index)
        self.loads.changed(worker.index)

    def keep(self, row: int, worker: Worker) -> None:
        """Notes that the worker has the KV of a session that does not run."""
        requests = self.requests
        context = self.kv_of(row)
        requests["worker"][row], requests["claim"][row] = worker.index + 1, context
        worker.kept.add(row)
        worker.kv_claimed += context
        self.worklist.changed(worker.index)
        self.loads.changed(worker.index)

    def asks(self, row: int, worker: Worker) -> None:
        """Notes that the next turn of a session on this worker waits."""
        worker.waiting_turns[row] = None
        self.waiting_turns_at.add(worker.index)

    def asks_no_more(self, row: int, worker: Worker) -> None:
        worker.waiting_turns.pop(row, None)
        if not worker.waiting_turns:
            self.waiting_turns_at.discard(worker.index)

    def rename(self, row: int, request_id: str) -> None:
        del self.request_row[self.request_id[row]]
        self.request_id[row], self.request_row[request_id] = request_id, row

    def kv_of(self, row: int) -> int:
        """KV tokens of a request where it lies: without the environment tokens that no worker has yet, and of a fork
        that no worker has yet those of the branch that it leaves.
        """
        requests = self.requests
        if left := int(requests["left"][row]):
            return left
        return int(requests["prompt_tokens"][row] + requests["tokens"][row] - requests["input_tokens"][row])

    def parked_kv_of(self, row: int) -> int:
        """The room in a pool, in tokens of KV, of a request with its state."""
        return self.kv_of(row) + self.state_tokens

    def idles(self, row: int) -> None:
        """Notes that a turn of a session has ended."""
        self.requests["status"][row] = RequestStatus.IDLE
        self.requests["idle_s"][row] = self.now_s
        self.idle.setdefault(int(self.requests["version"][row]), set()).add(row)

    def idles_no_more(self, row: int) -> None:
        version = int(self.requests["version"][row])
        rows = self.idle[version]
        rows.remove(row)
        if not rows:
            del self.idle[version]

    def move_off(self, row: int) -> Worker:
        """Takes the request off its worker, which is told to remove it. Returns that worker.

        Its claim leaves the worker at once: engines report seldom, and if moves only added claims, all would look full.
        """
        worker = self.take_away(row)
        worker.kv_change -= self.kv_of(row)
        return worker

    def take_away(self, row: int) -> Worker:
        worker = self.owner(row)
        assert worker is not None, f"request {self.request_id[row]} is on no worker"
        worker.rows.discard(row)
        worker.kept.discard(row)
        self.asks_no_more(row, worker)
        worker.kv_claimed -= int(self.requests["claim"][row])
        self.requests["worker"][row] = 0
        self.requests["claim"][row] = self.requests["starting"][row] = 0
        self.worklist.changed(worker.index)
        self.loads.changed(worker.index)
        return worker


def _free_index(members: Sequence[object | None]) -> int:
    return next((index for index, member in enumerate(members) if member is None), len(members))


def unfinished(requests: Table) -> Column:
    """Marks rows of admitted requests that have not ended, idle sessions included; bool."""
    status = requests["status"]
    mask: Column = (status == WAITING) | (status == RUNNING) | (status == IDLE)
    return mask
