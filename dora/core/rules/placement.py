"""Places waiting requests on workers, and puts them back into the queue when their worker is lost."""

from dora.core import commands as do
from dora.core.fleet.worker import Worker
from dora.core.state import State


def start(state: State, row: int, worker: Worker) -> None:
    """Sends a request without an owner to a worker: new, or resumed by re-prefilling its delivered tokens."""
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
    """Puts a request without an owner first in the queue of its version."""
    state.wait_first(row)
    state.counters.requests_orphaned += 1
