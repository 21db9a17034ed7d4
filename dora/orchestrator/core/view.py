"""Makes the frozen view that planners read. Copies of the worker columns (few), views of the request columns (many)."""

from operator import attrgetter

import numpy as np

from dora.orchestrator.core.snapshot import RequestColumns, Snapshot, WorkerColumns
from dora.orchestrator.core.state import RequestStatus, State, Worker
from dora.orchestrator.core.table import Column, Table

NOBODY = Worker("", 0, 0, 0, 0)
WAITING, RUNNING = int(RequestStatus.WAITING), int(RequestStatus.RUNNING)


def snapshot(state: State) -> Snapshot:
    requests, window = state.requests, state.window
    status = requests["status"]
    live = range(window.oldest_live, window.newest + 1)
    dried_up = state.exhausted and not state.backlog
    groups = max(1, len(state.groups))
    tokens, prompt_tokens = (float(requests[name].sum()) for name in ("expected", "prompt_tokens"))  # free rows are 0
    return Snapshot(
        now_s=state.now_s,
        step=window.step,
        newest=window.newest,
        window=window.size,
        groups_per_step=window.groups_per_step,
        admissible={v: 0 if dried_up else window.admissible(v) for v in live},
        cost=state.cost,
        group_tokens=tokens / groups,
        group_kv_tokens=(tokens + prompt_tokens) / groups,
        backlog_longest=state.backlog.lengths(),
        workers=_worker_columns(state),
        requests=RequestColumns(
            unfinished=unfinished(requests),
            movable=(status == RUNNING) & ~requests["moving"] & (requests["rests_until_s"] <= state.now_s),
            version=requests["version"],
            worker=requests["worker"] - 1,
            prompt_tokens=requests["prompt_tokens"],
            tokens=requests["tokens"],
            expected_tokens=requests["expected"],
            max_tokens=requests["max_tokens"],
            log_mean=requests["log_mean"],
            log_sd=requests["log_sd"],
        ),
    )


def unfinished(requests: Table) -> Column:
    """Whether a row is of an admitted request that has not ended; bool."""
    status = requests["status"]
    mask: Column = (status == WAITING) | (status == RUNNING)
    return mask


def _worker_columns(state: State) -> WorkerColumns:
    seats = [worker or NOBODY for worker in state.seats]

    def column(name: str) -> Column:
        return np.fromiter(map(attrgetter(name), seats), dtype=np.int64, count=len(seats))

    owned = np.fromiter(map(len, map(attrgetter("rows"), seats)), dtype=np.int64, count=len(seats))
    kv_used = column("kv_used")
    seated = state.hosting.seated(len(seats))
    return WorkerColumns(
        alive=seated["alive"].astype(bool),
        loaded=seated["loaded"],
        target=seated["target"],
        draining=seated["draining"].astype(bool),
        slots=seated["slots"],
        held=owned + column("inbound"),
        kv_tokens=seated["kv_tokens"],
        kv_claimed=column("kv_claimed"),
        kv_expected=np.maximum(0, kv_used + column("kv_change")) + column("kv_inbound"),  # Worker.kv_expected
        kv_used=kv_used,
        waiting=column("waiting"),
    )
