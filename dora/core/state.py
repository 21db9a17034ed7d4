"""Everything the core knows, in one place. The modules beside this one are functions over it."""

from collections import ChainMap, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from dora.config import Config
from dora.core.commands import Command, RejectVersion, WorkerCommand
from dora.core.fleet.hosting import Hosting
from dora.core.fleet.loads import Loads
from dora.core.fleet.pool import Pool
from dora.core.fleet.worker import Worker
from dora.core.forecast.adaptive import AdaptiveSize
from dora.core.forecast.cost import CostModel
from dora.core.forecast.prediction import PREDICTORS, PromptTraits
from dora.core.forecast.rates import Rates
from dora.core.groups.evaluations import Evaluations
from dora.core.groups.freshness import Freshness
from dora.core.groups.queues import Backlog, WaitingRequests
from dora.core.groups.window import Window
from dora.core.handoff.table import Handoff
from dora.core.table import Column, Table
from dora.core.worklist import Worklist


class RequestStatus(IntEnum):
    """0 is a free row."""

    WAITING = 1  # admitted, on no worker; it may be parked
    RUNNING = 2  # owned by a worker
    FINISHED = 3  # complete, being scored
    SCORED = 4


# plain integers: numpy takes sixty times as long to compare a cell with a member of an enumeration
WAITING, RUNNING, FINISHED, SCORED = map(int, RequestStatus)


class GroupStatus(IntEnum):
    OPEN = 1  # some response is unfinished or unscored
    FINISHED = 2  # waits for a step
    LEASED = 3  # taken by the step that the trainer has not committed


OPEN, GROUP_FINISHED, LEASED = map(int, GroupStatus)


@dataclass(frozen=True, slots=True)
class Pending:
    """A command to a worker whose outcome is due."""

    command: WorkerCommand
    handoff: Handoff | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """What a worker said of a version's weights, in which of its lives."""

    epoch: int
    reason: str
    canary_difference: float  # largest of a logprob; 0 where none was compared


@dataclass(slots=True)
class SuspectVersion:
    """A version that nobody has loaded well and somebody has refused."""

    refusals: dict[str, Refusal] = field(default_factory=dict)  # by worker id
    second: str = ""  # the one worker that may try it now; empty: none can


@dataclass(slots=True)
class Counters:
    """Since the start; shown to operators."""

    prompts_cancelled: int = 0  # taken back before they were admitted
    groups_admitted: int = 0
    groups_taken: int = 0
    groups_trained: int = 0
    groups_cancelled: int = 0
    groups_redundant: int = 0  # of these, dropped as their step had enough
    migrations_kv: int = 0
    migrations_reprefill: int = 0
    migrations_failed: int = 0  # undone: refused, timed out, a worker lost
    migrations_overtaken: int = 0  # the response ended first
    requests_orphaned: int = 0
    requests_parked: int = 0  # into a pool
    requests_resumed: int = 0  # from a pool, with their KV
    parked_lost: int = 0  # lost or dropped by a pool, or it could not be resumed: re-prefilled
    workers_lost: int = 0
    loads_failed: int = 0
    versions_rejected: int = 0
    staleness_max: int = 0
    versions_live_max: int = 0
    rebalances: int = 0
    c1_violations: int = 0


class State:
    """The core's whole state. ``out`` collects the commands of the event now handled."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.window = Window(config.window.least, config.window.groups_per_step)
        self.adaptive = AdaptiveSize(config.window) if config.window.is_adaptive else None
        self.predictor = PREDICTORS[config.balance.predictor]()
        self.cost = CostModel.of(config.balance.cost) if config.balance.cost is not None else None
        self.rates = Rates()
        self.freshness = Freshness(config.window.freshness)
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
                "unfinished": np.int64,
                "unscored": np.int64,
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
                "pool": np.int64,  # the same of the pool where its KV lies while it waits or is being resumed
                "prompt_tokens": np.int64,
                "tokens": np.int64,
                "max_tokens": np.int64,
                "log_mean": np.float64,  # belief on the response's length: a lognormal's parameters
                "log_sd": np.float64,
                "expected": np.int64,  # its mean
                "placed_s": np.float64,  # when its present stay on a worker began, and with how many tokens
                "placed_tokens": np.int64,
                "claim": np.int64,  # at its worker, or at its pool
                "claim_inbound": np.int64,  # claimed at the target of its handoff
                "moving": np.bool_,
                "moves": np.int64,
                "starting": np.int64,  # its StartRequest, until obeyed: reports before are of an earlier stay
                "rests_until_s": np.float64,  # a move of it failed: not planned again before
            }
        )
        self.request_id: dict[int, str] = {}
        self.request_row: dict[str, int] = {}
        self.traits: dict[int, PromptTraits] = {}  # group row -> what lengths are predicted from
        self.waiting: dict[int, WaitingRequests] = {}  # version -> request rows on no worker
        self.finished: dict[int, deque[int]] = {}  # deadline -> group rows that wait for a step, where there are any
        self.evaluations = Evaluations()  # beside all of that
        # trainer
        self.trainer_epoch = 0
        self.stream_step: int | None = None  # the step whose stream is open
        self.leased: list[int] = []  # group rows taken by the step not yet committed
        self.short_step = -1  # the step that ended short, as prompts had run out
        self.step_disturbed = False  # its times say nothing: a trainer has begun anew, or weights had to come again
        self.retired = 0  # versions below are retired
        self.arrived: dict[str, set[int]] = {}  # versions by host, of those with a store of their own (arrival.py)
        self.missing: set[int] = set()  # kept versions that the service's own store has not, though it should
        # what workers make of versions (rejection.py)
        self.proven: set[int] = set()  # kept versions that some worker has loaded well
        self.suspects: dict[int, SuspectVersion] = {}  # version -> who has refused it so far
        self.rejected: dict[int, RejectVersion] = {}  # version -> why, until it is published anew
        self.gone: dict[int, str] = {}  # kept versions whose weights no host has any more -> why
        self.asked: set[int] = set()  # versions that were rejected since the last commit, and are not published anew
        self.replan = False  # which versions may be loaded has changed: the next plan is due at once
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
        """Of the rows in a worker's report those whose tokens are to be taken over; bool (rows,).

        Not before StartRequest was obeyed: until then they are of an earlier stay of the request on this worker, or of
        another request that had its row.
        """
        requests = self.requests
        taken: Column = (requests["worker"][rows] == worker.index + 1) & (requests["starting"][rows] == 0)
        return taken

    def worker_at(self, worker_id: str, epoch: int) -> Worker | None:
        """The living worker of this id and epoch; None if either is over."""
        worker = self.workers.get(worker_id)
        return worker if worker is not None and worker.epoch == epoch else None

    def end(self, name: str) -> Worker | Pool | None:
        """The living worker or pool of this id: an end of a handoff."""
        return self.workers.get(name) or self.pools.get(name)

    def pool_of(self, row: int) -> Pool | None:
        """The pool that has the KV of a request which no worker holds."""
        index = int(self.requests["pool"][row]) - 1
        return self.pool_list[index] if index >= 0 else None

    def pool_with(self, kv_tokens: int, host: str) -> Pool | None:
        """Where so much KV may be parked: of the pools of this host, else of all, that with the most room; or None."""
        fit = (pool for pool in self.pools.values() if pool.free >= kv_tokens)
        return max(fit, key=lambda pool: (pool.host == host, pool.free, -pool.index), default=None)

    def names(self) -> Mapping[int, str]:
        """The ids of all requests, those of evaluations among them, by their rows."""
        if not self.evaluations.at:
            return self.request_id
        return self.request_id | {row: request.request_id for row, request in self.evaluations.at.items()}

    def rows(self) -> Mapping[str, int]:
        """The rows of all requests, those of evaluations among them, by their ids."""
        return ChainMap(self.request_row, self.evaluations.row_of) if self.evaluations.row_of else self.request_row

    def workers_of(self, version: int) -> Sequence[Worker]:
        """The workers that take requests of this version, by index."""
        return self.hosting.workers_of(version)

    # --------------------------------------------------------------------------------------------------- small writes

    def rehosted(self, worker: Worker) -> None:
        """What this worker hosts, or is to host, has changed."""
        self.hosting.moved(worker.index, self.worker_list[worker.index])
        self.worklist.changed(worker.index)

    def uses(self, worker: Worker, kv_tokens: int) -> None:
        """So much KV is in use on this worker now."""
        worker.kv_used, worker.kv_change = kv_tokens, 0
        self.loads.changed(worker.index)
        self.worklist.fills(worker.index, kv_tokens > self.config.balance.pressure * worker.kv_tokens)

    def command_id(self) -> int:
        self.commands_sent += 1
        return self.commands_sent

    def send(self, command: WorkerCommand, handoff: Handoff | None = None) -> None:
        """Sends a command to a worker and waits for its outcome."""
        self.pending[command.command_id] = Pending(command, handoff)
        self.out.append(command)  # type: ignore[arg-type]  # every subclass is a Command

    def send_first(self, command: WorkerCommand) -> None:
        """The same, before all that this event sends."""
        self.pending[command.command_id] = Pending(command)
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
        """The worker is gone."""
        del self.workers[worker.worker_id]
        self.worker_list[worker.index] = None
        self.worklist.fills(worker.index, False)
        self.loads.changed(worker.index)
        self.rehosted(worker)

    def free_index(self) -> int:
        return _free_index(self.worker_list)

    def answers_no_more(self, name: str, epoch: int) -> None:
        """This epoch of a worker or a pool is over: no outcome of a command to it is due any more."""
        self.pending = {
            number: pending
            for number, pending in self.pending.items()
            if (pending.command.worker_id, pending.command.epoch) != (name, epoch)
        }

    def add_pool(self, pool_id: str, epoch: int, kv_tokens: int, host: str) -> Pool:
        pool = self.pools[pool_id] = Pool(pool_id, epoch, _free_index(self.pool_list), kv_tokens, host)
        self.pool_list[pool.index : pool.index + 1] = [pool]
        return pool

    def remove_pool(self, pool: Pool) -> None:
        """The pool is gone."""
        del self.pools[pool.pool_id]
        self.pool_list[pool.index] = None

    def wait_first(self, row: int) -> None:
        """The request waits from now on, before those of its version that have not begun."""
        self.requests["status"][row] = RequestStatus.WAITING
        self.waiting.setdefault(int(self.requests["version"][row]), WaitingRequests()).push_first(row)
        self.worklist.wake()

    def park(self, row: int, pool: Pool, kv_tokens: int) -> None:
        """The KV of a request that no worker holds lies in the pool from now on."""
        self.requests["pool"][row] = pool.index + 1
        self.requests["claim"][row] = kv_tokens
        pool.rows.add(row)
        pool.kv_claimed += kv_tokens

    def unpark(self, row: int) -> Pool:
        """The pool has the KV of the request no more, or need not keep it. Returns that pool."""
        pool = self.pool_of(row)
        assert pool is not None, f"request {self.request_id[row]} is in no pool"
        pool.rows.discard(row)
        pool.refused.discard(row)
        pool.kv_claimed -= int(self.requests["claim"][row])
        self.requests["pool"][row] = self.requests["claim"][row] = 0
        return pool

    def give(self, row: int, worker: Worker) -> None:
        """The worker owns the request from now on."""
        requests = self.requests
        tokens, prompt_tokens = int(requests["tokens"][row]), int(requests["prompt_tokens"][row])
        claim = prompt_tokens + max(tokens, int(requests["expected"][row]))
        requests["status"][row] = RequestStatus.RUNNING
        requests["placed_s"][row], requests["placed_tokens"][row] = self.now_s, tokens
        requests["worker"][row] = worker.index + 1
        requests["claim"][row] = claim
        requests["starting"][row] = 0
        worker.rows.add(row)
        self.worklist.given(worker.index)
        self.loads.changed(worker.index)
        worker.kv_claimed += claim
        worker.kv_change += prompt_tokens + tokens

    def give_all(self, rows: Sequence[int], worker: Worker, held: Sequence[int]) -> None:
        """The worker owns these requests from now on, as it did before; ``held``: response tokens that it has of each.

        What it has and has not told was generated before: it says nothing of its pace.
        """
        requests, indexes = self.requests, np.array(rows, np.int64)
        context = requests["prompt_tokens"][indexes] + requests["tokens"][indexes]
        claims = np.maximum(context, requests["prompt_tokens"][indexes] + requests["expected"][indexes])
        requests["status"][indexes] = RequestStatus.RUNNING
        requests["placed_s"][indexes], requests["placed_tokens"][indexes] = self.now_s, held
        requests["worker"][indexes], requests["claim"][indexes] = worker.index + 1, claims
        requests["starting"][indexes] = 0
        worker.rows.update(rows)
        worker.kv_claimed += int(claims.sum())
        worker.kv_change += int(context.sum())
        self.worklist.given(worker.index)
        self.loads.changed(worker.index)

    def move_off(self, row: int) -> Worker:
        """Its worker is told to let go of the request, which it owns no more. Returns that worker.

        Engines may report seldom: until they do, moves that only ever added would make all of them look full.
        """
        worker = self.take_away(row)
        worker.kv_change -= int(self.requests["prompt_tokens"][row] + self.requests["tokens"][row])
        return worker

    def take_away(self, row: int) -> Worker:
        """Its worker owns the request no more. Returns that worker."""
        worker = self.owner(row)
        assert worker is not None, f"request {self.request_id[row]} is on no worker"
        worker.rows.discard(row)
        worker.kv_claimed -= int(self.requests["claim"][row])
        self.requests["worker"][row] = 0
        self.requests["claim"][row] = self.requests["starting"][row] = 0
        self.worklist.changed(worker.index)
        self.loads.changed(worker.index)
        return worker


def _free_index(members: Sequence[object | None]) -> int:
    return next((index for index, member in enumerate(members) if member is None), len(members))


def unfinished(requests: Table) -> Column:
    """Whether a row is of an admitted request that has not ended; bool."""
    status = requests["status"]
    mask: Column = (status == WAITING) | (status == RUNNING)
    return mask
