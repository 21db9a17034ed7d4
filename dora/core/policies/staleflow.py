"""StaleFlow's strategies (section 5.3, appendix D): routing, selective synchronisation, migration.

In the paper an interrupted trajectory continues under newer weights. C1 forbids that here: it continues under its own
version. A worker is synchronised if other hosts of its version can take its requests, and requests migrate within their
version.
"""

import numpy as np

from dora.core.dispatcher import Dispatcher
from dora.core.fleet.worker import Worker
from dora.core.plan import Move, Plan, Trigger
from dora.core.policies.base import BasePolicy
from dora.core.policies.targets import cover, present_targets, waiting_versions
from dora.core.policies.throughput import MU, Load, RoutingBoard, load_of, relative_gain, throughput
from dora.core.view import View

WAIT_MAX = 3  # phi_wait: queued requests that an engine may keep
THROUGHPUT_RATIO = 5.0  # phi_throughput: ratio of the fastest to the slowest host of one version


class StaleFlowPolicy(BasePolicy):
    """Routing by marginal throughput (algorithms 2 and 3), selective synchronisation (4), migration (5)."""

    # ------------------------------------------------------------------------------------------------------- routing

    def versions(self, dispatcher: Dispatcher) -> range:
        """The waterfall: hosts of the oldest version come first, as they have the fewest options.

        The multi-level queue has the same order: a waiting request has only the hosts of its version (C1) and goes
        before new groups there.
        """
        return dispatcher.versions()[::-1]

    def room(self, dispatcher: Dispatcher, worker: Worker) -> float:
        """The difference between the next request's gain and the threshold."""
        waiting_requests, first = dispatcher.waiting_requests(worker.hosts), dispatcher.backlog.first()
        tokens = (
            dispatcher.context_tokens(waiting_requests.peek())
            if waiting_requests
            else first.prompt.prompt_tokens
            if first is not None
            else 0
        )
        over = relative_gain(load_of(worker), tokens, dispatcher.cost) - MU
        return over / dispatcher.step_scale(worker)  # tokens per second: the ideal worker is of the same kind

    def fits(self, dispatcher: Dispatcher, row: int, worker: Worker) -> bool:
        return load_of(worker).takes(dispatcher.context_tokens(row))

    # ------------------------------------------------------------------------------------------------------ planning

    def plan(self, view: View, trigger: Trigger) -> Plan:
        targets = present_targets(view, view.newest)
        board = RoutingBoard(view, targets)
        # before synchronisation, unlike algorithm 1: requests that still queue then have no host with room (C1)
        migrate(board)
        synchronise(view, targets, board)
        cover(view, targets)
        version = view.requests.version
        stay = (move for move in board.moves() if targets.get(move.target, version[move.row]) == version[move.row])
        return Plan(targets, tuple(stay))

    def relieve(self, view: View) -> tuple[Move, ...]:
        board = RoutingBoard(view, {})
        for row in board.displaced().tolist():
            board.route(row, board.peers(int(view.requests.version[row])).tolist())
        return board.moves()


def synchronise(view: View, targets: dict[int, int], board: RoutingBoard) -> None:
    """Algorithm 4: changes ``targets`` and clears the chosen workers.

    A worker is chosen if nothing can be routed to it and something could be under another version. Routing has just
    run, so the hosts of all other versions are at their limit, and only the worker's own gain decides. The emptiest
    worker comes first. A worker with requests is chosen only if all of them find another host (C1).

    In the paper a worker takes the newest version, under which any trajectory may continue, the stalest first. Here
    each continues under its own version (C1). So the worker takes the oldest version with queued requests that no host
    has room for, and the newest if there is none. Otherwise an old version that is short of KV would remain so until
    its deadline.
    """
    newest, workers = view.newest, view.workers
    queues = Queues(view, targets, board)
    admits = len(view.backlog_longest) > 0
    prompts = view.requests.prompt_tokens[view.requests.unfinished]
    tokens = int(prompts.mean()) if len(prompts) else 1
    begins = {version for version, groups in view.admissible.items() if admits and groups > 0}
    routable = {*waiting_versions(view), *begins, *queues.versions}  # algorithm 2 for all waiting requests
    lagging = [index for index, version in targets.items() if version not in routable]
    for index in sorted(lagging, key=lambda index: (int(workers.assigned[index]), index)):
        version = queues.oldest(newest)
        if version == targets[index]:
            continue
        if workers.assigned[index]:
            gains = version in routable and relative_gain(board.load(index), tokens, view.cost) >= MU
            if not gains or not board.clear(index):
                continue
        targets[index] = version
        board.release(index)
        queues.give(version, index)


class Queues:
    """By version: contexts of requests that engines queue beyond ``WAIT_MAX`` while no host of the version has room."""

    def __init__(self, view: View, targets: dict[int, int], board: RoutingBoard) -> None:
        self._workers, self._cost = view.workers, view.cost
        self._contexts: dict[int, list[int]] = {}
        for index in np.flatnonzero(board.stays).tolist():
            excess = board.on(index)[: max(0, int(board.waiting[index]) - WAIT_MAX)]
            if excess:
                self._contexts.setdefault(int(view.workers.loaded[index]), []).extend(board.context[excess].tolist())
        self.versions = frozenset(self._contexts)
        for index, version in targets.items():
            if self._workers.loaded[index] != version:  # it is about to load the version
                self.give(version, index)

    def oldest(self, default: int) -> int:
        """The oldest version whose queue has not been given a worker."""
        return min((version for version, contexts in self._contexts.items() if contexts), default=default)

    def give(self, version: int, index: int) -> None:
        """Gives a worker to a version: takes the requests that it can hold when empty off the version's queue."""
        contexts = self._contexts.get(version, [])
        load = Load(0, 0, 0, int(self._workers.slots[index]), int(self._workers.kv_tokens[index]))
        while contexts and relative_gain(load, contexts[-1], self._cost) >= MU:
            load = load.with_request(contexts.pop())


def migrate(board: RoutingBoard) -> None:
    """Algorithm 5: routes requests queued beyond ``WAIT_MAX``, then the fastest host's if the slowest is far behind."""
    for version in np.unique(board.workers.loaded[board.stays]).tolist():
        hosts = board.peers(version).tolist()
        for index in hosts:
            excess = max(0, int(board.waiting[index]) - WAIT_MAX)
            others = [host for host in hosts if host != index]
            for row in board.on(index)[:excess]:
                board.route(row, others)
        speeds = {index: throughput(board.load(index), board.cost) for index in hosts}
        fastest, slowest = (
            max(hosts, key=lambda index: (speeds[index], -index)),
            min(hosts, key=lambda index: speeds[index]),
        )
        if speeds[fastest] > THROUGHPUT_RATIO * speeds[slowest]:
            redistribute(board, fastest, hosts)


def redistribute(board: RoutingBoard, index: int, hosts: list[int]) -> None:
    """Routes all requests of this worker again. A request without another host with room stays."""
    rows = board.on(index)
    for row in rows:
        board.take_off(row)
    for row in rows:
        if not board.route(row, hosts):
            board.move(row, index)
