"""Makes the view for plans: copies of the worker columns (few), views of the request columns (many)."""

import numpy as np

from dora.core.groups.window import Window
from dora.core.rules.admission import admissible
from dora.core.state import DORMANT, RUNNING, SKIPPED, State, unfinished
from dora.core.table import Column, Table
from dora.core.view import RequestColumns, View, WorkerColumns


def view_of(state: State) -> View:
    requests, window = state.requests, state.window
    status = requests["status"]
    live = range(window.oldest_live, window.newest_sound + 1)
    dried_up = state.exhausted and not state.backlog
    groups = max(1, state.groups.used)
    start = np.where(status == DORMANT, state.rates.growth, status != SKIPPED)  # the chance that a request ever runs
    tokens, prompt_tokens = (float(start @ requests[name]) for name in ("expected", "prompt_tokens"))  # free rows are 0
    workers, zones = _worker_columns(state)
    return View(
        now_s=state.now_s,
        step=window.step,
        newest=window.newest_sound,
        window=window.size,
        groups_per_step=window.groups_per_step,
        admissible={v: 0 if dried_up else _admissible(state, v) for v in live},
        cost=state.cost,
        group_tokens=tokens / groups,
        group_kv_tokens=(tokens + prompt_tokens) / groups,
        backlog_longest=state.backlog.lengths(),
        workers=workers,
        requests=RequestColumns(
            unfinished=_seen(requests, window),
            movable=_movable(state, status),
            version=requests["version"],
            worker=np.where(status == RUNNING, requests["worker"] - 1, -1),
            prompt_tokens=requests["prompt_tokens"],
            tokens=requests["tokens"],
            expected_tokens=requests["expected"],
            max_tokens=requests["max_tokens"],
            log_mean=requests["log_mean"],
            log_sd=requests["log_sd"],
        ),
        state_tokens=state.state_tokens,
        zones=zones,
        crosses=state.places.crosses,
        pools=tuple(pool.free for pool in state.pools.values()),
    )


def _movable(state: State, status: Column) -> Column:
    """Running requests that a policy may move, but for those on hosts that leave by a deadline (rules/notice.py)."""
    requests = state.requests
    movable: Column = (status == RUNNING) & ~requests["moving"] & (requests["rests_until_s"] <= state.now_s)
    if state.notices:
        noticed = [worker.index + 1 for worker in state.workers.values() if worker.host in state.notices]
        movable &= ~np.isin(requests["worker"], noticed)
    return movable


def _admissible(state: State, version: int) -> int:
    """The newest version's groups that may begin now or later; an older version's that are wanted now."""
    newest = version == state.window.newest_sound
    return state.window.admissible(version) if newest else admissible(state, version)


def _seen(requests: Table, window: Window) -> Column:
    """Unfinished requests, except those of quarantined versions, which no worker can take now."""
    mask = unfinished(requests)
    return mask & ~np.isin(requests["version"], list(window.quarantined)) if window.quarantined else mask


def _worker_columns(state: State) -> tuple[WorkerColumns, tuple[str, ...]]:
    """The columns, and a host of each zone."""
    hosted, assigned = state.hosting.columns(len(state.worker_list)), state.loads.columns(state.worker_list)
    target, quarantined = hosted["target"], state.window.quarantined
    if quarantined:
        target[np.isin(target, list(quarantined))] = -1
    scales, at, zones = _places(state)
    return WorkerColumns(
        alive=hosted["alive"].astype(bool),
        loaded=hosted["loaded"],
        target=target,
        draining=hosted["draining"].astype(bool),
        slots=hosted["slots"],
        assigned=assigned["assigned"],
        kv_tokens=hosted["kv_tokens"],
        kv_claimed=assigned["kv_claimed"],
        kv_expected=assigned["kv_expected"],
        kv_used=assigned["kv_used"],
        waiting=assigned["waiting"],
        step_scale=scales,
        zone=at,
    ), zones


def _places(state: State) -> tuple[Column, Column, tuple[str, ...]]:
    """By index: the scale of steps and the number of the zone; and a host of each zone."""
    places, workers = state.places, state.worker_list
    if not places.are_unlike:
        return np.ones(len(workers)), np.zeros(len(workers), np.int64), ("",)
    default = next((worker.host for worker in workers if worker is not None), "")
    hosts = [worker.host if worker is not None else default for worker in workers]
    zones = {places.of(host).zone: host for host in hosts}
    numbers = {zone: number for number, zone in enumerate(zones)}
    at = np.array([numbers[places.of(host).zone] for host in hosts], np.int64)
    return np.array([places.step_scale(host) for host in hosts]), at, tuple(zones.values())
