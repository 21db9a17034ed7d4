"""Replaces workers and pools that report but make no progress. Their requests continue elsewhere.

- A **worker** that has requests and yields no token for ``patience_s``. The time counts only while it reports: a
  stopped process, or an engine in one long step, is silent instead (``workers.silence_timeout_s``). A worker without
  requests, one that loads weights, and requests that are being handed over do not count.
- A worker or **pool** that leaves a command unanswered for longer than two handoffs and a silence may take. A load has
  a time limit of its own.
"""

from typing import Final

import numpy as np

from dora.core import commands as do
from dora.core.fleet.pool import Pool
from dora.core.fleet.worker import Worker
from dora.core.rules import membership
from dora.core.state import State

STALLED: Final = "no progress: "
GAPS: Final = 30  # of a worker's own longest gaps between tokens
LEAST_S: Final = 30.0  # shortest patience with a worker
GAP_KEPT: Final = 0.99  # of the longest gap, at each report with tokens
REPORT_GAP_S: Final = 2.0  # a pause between two reports counts as at most this, or as two report periods


def reported(state: State, worker: Worker, grew: bool) -> None:
    """Notes a worker's report. ``grew`` says whether it brought tokens or ends of requests."""
    since_s, worker.reported_s = state.now_s - worker.reported_s, state.now_s
    most_s = max(REPORT_GAP_S, 2e-3 * state.config.workers.report_period_ms)
    if grew:
        worker.gap_s = max(worker.barren_s + min(since_s, most_s), GAP_KEPT * worker.gap_s)
        worker.barren_s = 0.0
    elif not worker.rows and not state.evaluations.count(worker.worker_id):
        worker.barren_s = 0.0
    elif worker.loading < 0 and not state.window.closed and _is_expected(state, worker):
        worker.barren_s += min(since_s, most_s)


def _is_expected(state: State, worker: Worker) -> bool:
    """Returns whether tokens should come: some request of the worker is in no handoff."""
    moving = state.requests["moving"]
    return bool(state.evaluations.count(worker.worker_id)) or any(not moving[row] for row in worker.rows)


def patience_s(state: State, worker: Worker) -> float:
    """The limit of a worker's time without a token: by its own pace, and by the time that the prefill of its longest
    context may take. It is at most ``workers.stall_timeout_s``, which also applies while the pace is unknown.
    """
    most_s, pace_s, cost = state.config.workers.stall_timeout_s, state.rates.pace_s, state.config.balance.cost
    if not pace_s:
        return most_s
    token_s = cost.prefill_token_s if cost is not None and cost.prefill_token_s else pace_s  # it takes no longer
    return min(most_s, max(LEAST_S, GAPS * worker.gap_s, 2.0 * token_s * _longest_context(state, worker)))


def _longest_context(state: State, worker: Worker) -> int:
    rows = np.fromiter(worker.rows, np.int64, len(worker.rows))
    prompt_tokens, tokens = state.requests.columns("prompt_tokens", "tokens")
    evaluated = state.evaluations.longest_context(worker.worker_id)
    return max(evaluated, int((prompt_tokens[rows] + tokens[rows]).max(initial=0)))


def overdue(state: State) -> None:
    if not state.config.workers.stall_timeout_s:
        return
    for worker in list(state.workers.values()):
        if worker.barren_s >= LEAST_S or worker.barren_s >= state.config.workers.stall_timeout_s:
            limit_s = patience_s(state, worker)
            if worker.barren_s >= limit_s and not worker.stopping:
                requests = len(worker.rows) + state.evaluations.count(worker.worker_id)
                why = f"no token of {requests} requests in {worker.barren_s:.0f} s of reports (limit {limit_s:.0f} s)"
                _replace(state, worker, why)
    _unanswered(state)


def _unanswered(state: State) -> None:
    config = state.config
    limit_s = 2.0 * config.balance.handoff_timeout_s + config.workers.silence_timeout_s
    for pending in list(state.pending.values()):
        if state.now_s - pending.sent_s < limit_s:
            break  # the others were sent later
        command = pending.command
        end = state.end(command.worker_id)
        if isinstance(command, do.LoadVersion) or end is None or end.epoch != command.epoch:
            continue
        _replace(state, end, f"{type(command).__name__} was not answered in {limit_s:.0f} s")


def _replace(state: State, end: Worker | Pool, reason: str) -> None:
    if isinstance(end, Worker):
        state.counters.stalls += not end.stopping
        membership.evict(state, end, STALLED + reason)
    elif not end.stopping:
        end.stopping = True
        state.counters.stalls += 1
        state.out.append(do.EvictWorker(end.pool_id, end.epoch, STALLED + reason))
