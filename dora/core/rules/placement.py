"""Places waiting requests on workers, and puts them back into the queue when they lose their place."""

from dora.core import commands as do
from dora.core.fleet.worker import Worker
from dora.core.state import IDLE, State


def start(state: State, row: int, worker: Worker) -> None:
    """Sends a request without an owner to a worker: new, or resumed by re-prefilling its delivered tokens."""
    state.give(row, worker)
    input_tokens = int(state.requests["input_tokens"][row])
    resumed = int(state.requests["tokens"][row]) > input_tokens
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
    state.counters.turns_reprefilled += bool(input_tokens)
    state.requests["input_tokens"][row] = state.requests["left"][row] = 0


def extend(state: State, row: int, worker: Worker) -> None:
    """Begins the requested turn of a session on the worker with its KV; the session is in no queue."""
    kv_tokens = state.kv_of(row)
    if state.owner(row) is worker:
        state.take_away(row)
        worker.kv_change -= kv_tokens  # which ``give`` counts as new
    state.give(row, worker)
    command = do.ExtendRequest(worker.worker_id, worker.epoch, state.command_id(), state.request_id[row])
    state.requests["starting"][row] = command.command_id
    state.requests["input_tokens"][row] = state.requests["left"][row] = 0
    state.send(command)
    state.counters.turns_resumed += 1


def arrive(state: State, row: int, worker: Worker) -> None:
    """Continues a request whose KV has arrived at a worker, or keeps it there until its next turn."""
    status, has_turn = state.requests["status"][row], bool(state.requests["input_tokens"][row])
    if status == IDLE or (has_turn and worker.assigned >= worker.slots):
        state.keep(row, worker)
        worker.kv_change += state.kv_of(row)
        queue_again(state, row)
    elif has_turn:
        extend(state, row, worker)
    else:
        state.give(row, worker)


def queue_again(state: State, row: int) -> None:
    """Puts a request that does not run first in its version's queue; an idle session awaits its next turn instead."""
    if state.requests["status"][row] == IDLE:
        return
    state.wait_first(row)
    if (worker := state.owner(row)) is not None:
        state.asks(row, worker)


def remove(state: State, row: int) -> None:
    worker = state.move_off(row)
    state.send(do.RemoveRequest(worker.worker_id, worker.epoch, state.command_id(), state.request_id[row]))


def leave_queue(state: State, row: int) -> None:
    """Takes a waiting request from its queue. The KV of a session stays where it is."""
    state.waiting[int(state.requests["version"][row])].remove(row)
    if (worker := state.owner(row)) is not None:
        state.asks_no_more(row, worker)


def orphan(state: State, row: int) -> None:
    """Queues a request whose worker is lost."""
    queue_again(state, row)
    state.counters.requests_orphaned += 1
