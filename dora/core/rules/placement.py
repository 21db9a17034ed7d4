"""Puts waiting requests on workers, and back in line when their worker is gone."""

from dora.core import commands as do
from dora.core.fleet.worker import Worker
from dora.core.state import State


def start(state: State, row: int, worker: Worker) -> None:
    """Sends a request that nobody holds to a worker: new, or resumed after its delivered tokens by re-prefilling."""
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
    state.wait_first(row)
    state.counters.requests_orphaned += 1
