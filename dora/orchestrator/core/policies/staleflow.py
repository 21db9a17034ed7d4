"""StaleFlow's strategies (paper 000, section 5.3, appendix D): routing, selective synchronisation, migration.

The paper lets an interrupted trajectory go on under newer weights. Here C1 holds: it goes on under its own version, so
a DP group is synchronised once other hosts of its version can take what it runs, and migration is within a version.
"""

import numpy as np

from dora.orchestrator.core.floor import Floor
from dora.orchestrator.core.policies.base import BasePolicy
from dora.orchestrator.core.policies.hosts import cover, present_targets, waiting_versions
from dora.orchestrator.core.policies.throughput import MU, Board, load_of, relative_gain, throughput
from dora.orchestrator.core.snapshot import Move, Plan, Snapshot, Trigger
from dora.orchestrator.core.state import Worker

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
        targets = present_targets(snapshot)
        board = Board(snapshot, targets)
        moves = synchronise(snapshot, targets, board)
        moves += migrate(board)
        cover(snapshot, targets)
        return Plan(targets, tuple(moves))

    def relieve(self, snapshot: Snapshot) -> tuple[Move, ...]:
        board, requests = Board(snapshot, {}), snapshot.requests
        leaving = np.flatnonzero(requests.movable & (requests.worker >= 0) & ~board.stays[requests.worker])
        routed = (board.route(row, board.hosts(int(requests.version[row]))) for row in leaving.tolist())
        return tuple(move for move in routed if move is not None)


def synchronise(snapshot: Snapshot, targets: dict[int, int], board: Board) -> list[Move]:
    """Algorithm 4: changes ``targets`` and ``board``; returns the moves that empty the DP groups it has chosen.

    A group that lags is chosen where nothing can be routed to it, and something would be under the newest version. As
    routing has just run, the hosts of all other versions are at their limit, so that is whether its own gain is enough.
    The emptiest comes first. One that runs requests is chosen only where they all find another host (C1).
    """
    newest, waited, workers, requests = snapshot.newest, waiting_versions(snapshot), snapshot.workers, snapshot.requests
    offers = len(snapshot.backlog_longest) > 0
    prompts = requests.prompt_tokens[requests.unfinished]
    tokens = int(prompts.mean()) if len(prompts) else 1

    def routable(version: int) -> bool:
        """Algorithm 2 for all that waits: something could go on, or begin, under this version."""
        return version in waited or (offers and snapshot.admissible.get(version, 0) > 0)

    moves: list[Move] = []
    lagging = [seat for seat, version in targets.items() if version < newest and not routable(version)]
    for seat in sorted(lagging, key=lambda seat: (int(workers.held[seat]), seat)):
        if workers.held[seat]:
            if not routable(newest) or relative_gain(board.loads[seat], tokens, snapshot.cost) < MU:
                continue
            cleared = clear(board, seat, int(workers.held[seat]))
            if cleared is None:
                continue
            moves += cleared
        targets[seat] = newest
        board.stays[seat] = False
    return moves


def clear(board: Board, seat: int, held: int) -> list[Move] | None:
    """Moves that leave the DP group empty; None, and nothing changed, where something on it has to stay."""
    rows, before = board.on(seat), list(board.loads)
    others = [host for host in board.hosts(int(board.version[seat])) if host != seat]
    moves: list[Move] = []
    for row in rows if len(rows) == held else ():
        move = board.route(row, others)
        if move is None:
            break
        moves.append(move)
    if len(moves) == held:
        return moves
    board.loads = before
    return None


def migrate(board: Board) -> list[Move]:
    """Algorithm 5: what engines queue beyond ``WAIT_MAX``, then the fastest host where the slowest is far behind."""
    moves: list[Move] = []
    for version in np.unique(board.version[board.stays]).tolist():
        hosts = board.hosts(version)
        queued = [move for seat in hosts for move in _queued(board, seat, hosts)]
        moves += queued
        speeds = {seat: throughput(board.loads[seat], board.cost) for seat in hosts}
        fastest, slowest = max(hosts, key=lambda seat: (speeds[seat], -seat)), min(hosts, key=lambda seat: speeds[seat])
        if speeds[fastest] > THROUGHPUT_RATIO * speeds[slowest]:
            moves += _redistributed(board, fastest, hosts, {move.row for move in queued})
    return moves


def _queued(board: Board, seat: int, hosts: list[int]) -> list[Move]:
    excess = max(0, board.loads[seat].waiting - WAIT_MAX)
    others = [host for host in hosts if host != seat]
    routed = (board.route(row, others) for row in board.on(seat)[:excess])
    return [move for move in routed if move is not None]


def _redistributed(board: Board, seat: int, hosts: list[int], moved: set[int]) -> list[Move]:
    """All that runs on this DP group is routed anew; what comes back to it does not move."""
    rows = [row for row in board.on(seat) if row not in moved]
    board.loads[seat] = board.loads[seat].without(board.context(row) for row in rows)
    routed = (board.route(row, hosts) for row in rows)
    return [move for move in routed if move is not None and move.target != seat]
