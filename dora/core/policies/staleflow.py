"""StaleFlow's strategies (section 5.3, appendix D): routing, selective synchronisation, migration.

The paper lets an interrupted trajectory go on under newer weights. Here C1 holds: it goes on under its own version, so
a worker is synchronised once other hosts of its version can take what it runs, and migration is within a version.
"""

import numpy as np

from dora.core.dispatcher import Dispatcher
from dora.core.fleet.worker import Worker
from dora.core.plan import Move, Plan, Trigger
from dora.core.policies.base import BasePolicy
from dora.core.policies.targets import cover, present_targets, waiting_versions
from dora.core.policies.throughput import MU, Load, RoutingBoard, load_of, relative_gain, throughput
from dora.core.view import View

WAIT_MAX = 3  # phi_wait: so many queued requests are left to an engine
THROUGHPUT_RATIO = 5.0  # phi_throughput: between the fastest and the slowest host of one version


class StaleFlowPolicy(BasePolicy):
    """Routing by marginal throughput (algorithms 2 and 3), selective synchronisation (4), migration (5)."""

    # ------------------------------------------------------------------------------------------------------- routing

    def versions(self, dispatcher: Dispatcher) -> range:
        """The waterfall: hosts of the oldest version that takes anything come first, as they have the fewest options.

        The multi-level queue is the same order: a waiting request has only the hosts of its version (C1), where it goes
        before new groups.
        """
        return dispatcher.versions()[::-1]

    def room(self, dispatcher: Dispatcher, worker: Worker) -> float:
        """How far the gain of what comes next is above the threshold."""
        waiting_requests, first = dispatcher.waiting_requests(worker.hosts), dispatcher.backlog.first()
        tokens = (
            dispatcher.context_tokens(waiting_requests.peek())
            if waiting_requests
            else first.prompt.prompt_tokens
            if first is not None
            else 0
        )
        return relative_gain(load_of(worker), tokens, dispatcher.cost) - MU

    def fits(self, dispatcher: Dispatcher, row: int, worker: Worker) -> bool:
        return load_of(worker).takes(dispatcher.context_tokens(row))

    # ------------------------------------------------------------------------------------------------------ planning

    def plan(self, view: View, trigger: Trigger) -> Plan:
        targets = present_targets(view, view.newest)
        board = RoutingBoard(view, targets)
        migrate(board)  # before, not after as in algorithm 1: what still queues then has no host with room (C1)
        synchronise(view, targets, board)
        cover(view, targets)
        return Plan(targets, board.moves())

    def relieve(self, view: View) -> tuple[Move, ...]:
        board = RoutingBoard(view, {})
        for row in board.displaced().tolist():
            board.route(row, board.peers(int(view.requests.version[row])).tolist())
        return board.moves()


def synchronise(view: View, targets: dict[int, int], board: RoutingBoard) -> None:
    """Algorithm 4: changes ``targets``, and clears the workers it has chosen.

    A group is chosen where nothing can be routed to it, and something would be under another version. As routing has
    just run, the hosts of all other versions are at their limit, so that is whether its own gain is enough. The
    emptiest comes first. One that runs requests is chosen only where they all find another host (C1).

    The paper's group takes the newest version, under which any trajectory may go on, the stalest first. Here each goes
    on under its own (C1): so the group takes the oldest version that engines queue requests of which no host has room
    for, and the newest once there is none. Else an old version that is short of KV would stay so until its deadline.
    """
    newest, workers = view.newest, view.workers
    queues = Queues(view, targets, board)
    admits = len(view.backlog_longest) > 0
    prompts = view.requests.prompt_tokens[view.requests.unfinished]
    tokens = int(prompts.mean()) if len(prompts) else 1
    begins = {version for version, groups in view.admissible.items() if admits and groups > 0}
    routable = {*waiting_versions(view), *begins, *queues.versions}  # algorithm 2 for all that waits
    lagging = [index for index, version in targets.items() if version not in routable]
    for index in sorted(lagging, key=lambda index: (int(workers.held[index]), index)):
        version = queues.oldest(newest)
        if version == targets[index]:
            continue
        if workers.held[index]:
            gains = version in routable and relative_gain(board.load(index), tokens, view.cost) >= MU
            if not gains or not board.clear(index):
                continue
        targets[index] = version
        board.release(index)
        queues.give(version, index)


class Queues:
    """By version: contexts of what engines queue beyond ``WAIT_MAX`` where no host of the version has room."""

    def __init__(self, view: View, targets: dict[int, int], board: RoutingBoard) -> None:
        self._workers, self._cost = view.workers, view.cost
        self._contexts: dict[int, list[int]] = {}
        for index in np.flatnonzero(board.stays).tolist():
            excess = board.on(index)[: max(0, int(board.waiting[index]) - WAIT_MAX)]
            if excess:
                self._contexts.setdefault(int(view.workers.loaded[index]), []).extend(board.context[excess].tolist())
        self.versions = frozenset(self._contexts)
        for index, version in targets.items():
            if self._workers.loaded[index] != version:  # it is on its way
                self.give(version, index)

    def oldest(self, default: int) -> int:
        """The oldest version with a queue that no worker was given for."""
        return min((version for version, contexts in self._contexts.items() if contexts), default=default)

    def give(self, version: int, index: int) -> None:
        """A worker, to be emptied for it, is to take what it can of a version's queue."""
        contexts = self._contexts.get(version, [])
        load = Load(0, 0, 0, int(self._workers.slots[index]), int(self._workers.kv_tokens[index]))
        while contexts and relative_gain(load, contexts[-1], self._cost) >= MU:
            load = load.given(contexts.pop())


def migrate(board: RoutingBoard) -> None:
    """Algorithm 5: what engines queue beyond ``WAIT_MAX``, then the fastest host where the slowest is far behind."""
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
    """All that is on this worker is routed anew; what comes back to it, or finds no room, does not move."""
    rows = board.on(index)
    for row in rows:
        board.take_off(row)
    for row in rows:
        if not board.route(row, hosts):
            board.move(row, index)
