"""StaleFlow's strategies (paper 000, section 5.3, appendix D): routing, selective synchronisation, migration.

The paper lets an interrupted trajectory go on under newer weights. Here C1 holds: it goes on under its own version, so
a DP group is synchronised once other hosts of its version can take what it runs, and migration is within a version.
"""

import numpy as np

from dora.orchestrator.core.floor import Floor
from dora.orchestrator.core.plan import Move, Plan, Trigger
from dora.orchestrator.core.policies.base import BasePolicy
from dora.orchestrator.core.policies.targets import cover, present_targets, waiting_versions
from dora.orchestrator.core.policies.throughput import MU, Load, RoutingBoard, load_of, relative_gain, throughput
from dora.orchestrator.core.snapshot import Snapshot
from dora.orchestrator.core.worker import Worker

WAIT_MAX = 3  # phi_wait: so many queued requests are left to an engine
THROUGHPUT_RATIO = 5.0  # phi_throughput: between the fastest and the slowest host of one version


class StaleFlowPolicy(BasePolicy):
    """Routing by marginal throughput (algorithms 2 and 3), selective synchronisation (4), migration (5)."""

    # ------------------------------------------------------------------------------------------------------- routing

    def versions(self, floor: Floor) -> range:
        """The waterfall: hosts of the oldest version that takes anything come first, as they have the fewest options.

        The multi-level queue is the same order: a waiting request has only the hosts of its version (C1), where it goes
        before new groups.
        """
        return floor.versions()[::-1]

    def room(self, floor: Floor, worker: Worker) -> float:
        """How far the gain of what comes next is above the threshold."""
        line, first = floor.line(worker.hosts), floor.backlog.first()
        tokens = floor.context_tokens(line.peek()) if line else first.prompt.prompt_tokens if first is not None else 0
        return relative_gain(load_of(worker), tokens, floor.cost) - MU

    def fits(self, floor: Floor, row: int, worker: Worker) -> bool:
        return load_of(worker).takes(floor.context_tokens(row))

    # ------------------------------------------------------------------------------------------------------ planning

    def plan(self, snapshot: Snapshot, trigger: Trigger) -> Plan:
        targets = present_targets(snapshot, snapshot.newest)
        board = RoutingBoard(snapshot, targets)
        migrate(board)  # before, not after as in algorithm 1: what still queues then has no host with room (C1)
        synchronise(snapshot, targets, board)
        cover(snapshot, targets)
        return Plan(targets, board.moves())

    def relieve(self, snapshot: Snapshot) -> tuple[Move, ...]:
        board = RoutingBoard(snapshot, {})
        for row in board.displaced().tolist():
            board.route(row, board.peers(int(snapshot.requests.version[row])).tolist())
        return board.moves()


def synchronise(snapshot: Snapshot, targets: dict[int, int], board: RoutingBoard) -> None:
    """Algorithm 4: changes ``targets``, and clears the DP groups it has chosen.

    A group is chosen where nothing can be routed to it, and something would be under another version. As routing has
    just run, the hosts of all other versions are at their limit, so that is whether its own gain is enough. The
    emptiest comes first. One that runs requests is chosen only where they all find another host (C1).

    The paper's group takes the newest version, under which any trajectory may go on, the stalest first. Here each goes
    on under its own (C1): so the group takes the oldest version that engines queue requests of which no host has room
    for, and the newest once there is none. Else an old version that is short of KV would stay so until its deadline.
    """
    newest, workers = snapshot.newest, snapshot.workers
    queues = Queues(snapshot, targets, board)
    admits = len(snapshot.backlog_longest) > 0
    prompts = snapshot.requests.prompt_tokens[snapshot.requests.unfinished]
    tokens = int(prompts.mean()) if len(prompts) else 1
    begins = {version for version, groups in snapshot.admissible.items() if admits and groups > 0}
    routable = {*waiting_versions(snapshot), *begins, *queues.versions}  # algorithm 2 for all that waits
    lagging = [seat for seat, version in targets.items() if version not in routable]
    for seat in sorted(lagging, key=lambda seat: (int(workers.held[seat]), seat)):
        version = queues.oldest(newest)
        if version == targets[seat]:
            continue
        if workers.held[seat]:
            gains = version in routable and relative_gain(board.load(seat), tokens, snapshot.cost) >= MU
            if not gains or not board.clear(seat):
                continue
        targets[seat] = version
        board.release(seat)
        queues.give(version, seat)


class Queues:
    """By version: contexts of what engines queue beyond ``WAIT_MAX`` where no host of the version has room."""

    def __init__(self, snapshot: Snapshot, targets: dict[int, int], board: RoutingBoard) -> None:
        self._workers, self._cost = snapshot.workers, snapshot.cost
        self._contexts: dict[int, list[int]] = {}
        for seat in np.flatnonzero(board.stays).tolist():
            excess = board.on(seat)[: max(0, int(board.waiting[seat]) - WAIT_MAX)]
            if excess:
                self._contexts.setdefault(int(snapshot.workers.loaded[seat]), []).extend(board.context[excess].tolist())
        self.versions = frozenset(self._contexts)
        for seat, version in targets.items():
            if self._workers.loaded[seat] != version:  # it is on its way
                self.give(version, seat)

    def oldest(self, default: int) -> int:
        """The oldest version with a queue that no DP group was given for."""
        return min((version for version, contexts in self._contexts.items() if contexts), default=default)

    def give(self, version: int, seat: int) -> None:
        """A DP group, to be emptied for it, is to take what it can of a version's queue."""
        contexts = self._contexts.get(version, [])
        load = Load(0, 0, 0, int(self._workers.slots[seat]), int(self._workers.kv_tokens[seat]))
        while contexts and relative_gain(load, contexts[-1], self._cost) >= MU:
            load = load.given(contexts.pop())


def migrate(board: RoutingBoard) -> None:
    """Algorithm 5: what engines queue beyond ``WAIT_MAX``, then the fastest host where the slowest is far behind."""
    for version in np.unique(board.workers.loaded[board.stays]).tolist():
        hosts = board.peers(version).tolist()
        for seat in hosts:
            excess = max(0, int(board.waiting[seat]) - WAIT_MAX)
            others = [host for host in hosts if host != seat]
            for row in board.on(seat)[:excess]:
                board.route(row, others)
        speeds = {seat: throughput(board.load(seat), board.cost) for seat in hosts}
        fastest, slowest = max(hosts, key=lambda seat: (speeds[seat], -seat)), min(hosts, key=lambda seat: speeds[seat])
        if speeds[fastest] > THROUGHPUT_RATIO * speeds[slowest]:
            redistribute(board, fastest, hosts)


def redistribute(board: RoutingBoard, seat: int, hosts: list[int]) -> None:
    """All that is on this DP group is routed anew; what comes back to it, or finds no room, does not move."""
    rows = board.on(seat)
    for row in rows:
        board.take_off(row)
    for row in rows:
        if not board.route(row, hosts):
            board.move(row, seat)
