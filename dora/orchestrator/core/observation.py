"""Makes the view that plans are made from: copies of the worker columns (few), views of the request columns (many)."""

from dora.orchestrator.core.state import RUNNING, State, unfinished
from dora.orchestrator.core.view import RequestColumns, View, WorkerColumns


def view_of(state: State) -> View:
    requests, window = state.requests, state.window
    status = requests["status"]
    live = range(window.oldest_live, window.newest + 1)
    dried_up = state.exhausted and not state.backlog
    groups = max(1, state.groups.used)
    tokens, prompt_tokens = (float(requests[name].sum()) for name in ("expected", "prompt_tokens"))  # free rows are 0
    return View(
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


def _worker_columns(state: State) -> WorkerColumns:
    hosted, held = state.hosting.columns(len(state.worker_list)), state.loads.columns(state.worker_list)
    return WorkerColumns(
        alive=hosted["alive"].astype(bool),
        loaded=hosted["loaded"],
        target=hosted["target"],
        draining=hosted["draining"].astype(bool),
        slots=hosted["slots"],
        held=held["held"],
        kv_tokens=hosted["kv_tokens"],
        kv_claimed=held["kv_claimed"],
        kv_expected=held["kv_expected"],
        kv_used=held["kv_used"],
        waiting=held["waiting"],
    )
