"""Puts waiting requests on workers: new ones, and those whose worker is gone (resumed by re-prefilling)."""

from collections import deque
from collections.abc import Iterable
from heapq import heapify, heappop, heappush, heapreplace

from dora.orchestrator.core import commands as do
from dora.orchestrator.core.state import RequestStatus, State, Worker


class Room:
    """Workers of one version by their free slots, while requests are placed on them: a look costs O(log workers)."""

    def __init__(self, hosts: Iterable[Worker]) -> None:
        self._heap = [(worker.held - worker.slots, seat, worker) for seat, worker in enumerate(hosts)]
        heapify(self._heap)

    def roomiest(self, need_tokens: int) -> Worker | None:
        """The worker with the most free slots and room for ``need_tokens`` more KV."""
        heap, found = self._heap, None
        unfit = []
        while heap and found is None:
            key, order, worker = heap[0]
            taken = worker.held - worker.slots
            if taken != key:  # it was given something since
                heapreplace(heap, (taken, order, worker))
            elif taken >= 0:
                break
            elif not worker.held or worker.kv_claimed + need_tokens <= worker.kv_tokens:
                found = worker
            else:
                unfit.append(heappop(heap))
        for entry in unfit:
            heappush(heap, entry)
        return found


def place_waiting(state: State, version: int, room: Room) -> None:
    """Starts what waits for this version while there is room, first come first served, orphans before all."""
    waiting = state.waiting.get(version)
    while waiting:
        row = waiting[0]
        need = int(state.requests["prompt_tokens"][row] + state.requests["tokens"][row] + 1)
        worker = room.roomiest(need)
        if worker is None:
            return
        waiting.popleft()
        start(state, row, worker)


def start(state: State, row: int, worker: Worker) -> None:
    """Sends a request that nobody holds to a worker: new, or resumed after its delivered tokens."""
    state.give(row, worker)
    resumed = bool(state.requests["tokens"][row])
    command = do.StartRequest(
        worker.worker_id,
        worker.epoch,
        state.command_id(),
        state.request_id[row],
        int(state.requests["version"][row]),
        "re-prefilled" if resumed else "new",
    )
    state.requests["starting"][row] = command.command_id
    state.send(command)
    state.counters.migrations_reprefill += resumed


def orphan(state: State, row: int) -> None:
    """Nobody holds the request now: it waits, first in line, for another worker of its version."""
    state.requests["status"][row] = RequestStatus.WAITING
    state.waiting.setdefault(int(state.requests["version"][row]), deque()).appendleft(row)
    state.counters.requests_orphaned += 1
    state.settling = True
