"""Counts of requests by state and by age of their version."""

from typing import Final

import numpy as np

from dora.core.groups.window import Window
from dora.core.state import FINISHED, IDLE, LEASED, RUNNING, SCORED, WAITING, State
from dora.core.table import Column
from dora.metrics.declaration import Labelled

FREE: Final = "free"
# The states of a request, as codes from 0. An idle session is in tool time.
STATES: Final = (FREE, "waiting", "running", "moving", "parked", "idle", "scoring", "finished", "leased")
_CODE: Final = {name: code for code, name in enumerate(STATES)}


def ages(window: Window) -> range:
    """Returns the ages of the versions in the window; 0 is the newest."""
    return range(max(window.size, window.newest - window.oldest_live + 1))


def requests_by_state(state: State) -> Labelled:
    """Returns the number of requests of each state and age, zeros included."""
    requests, count = state.requests, len(ages(state.window))
    codes = _codes(state)
    held = np.flatnonzero(codes)
    age = np.clip(state.window.newest - requests["version"][held], 0, count - 1)
    found = np.bincount(codes[held] * count + age, minlength=len(STATES) * count)
    return {
        (name, str(age)): float(found[code * count + age])
        for name, code in _CODE.items()
        if name != FREE
        for age in range(count)
    }


def _codes(state: State) -> Column:
    requests, groups = state.requests, state.groups
    status, moving = requests["status"], requests["moving"]
    codes = np.zeros(len(status), np.int64)
    codes[status == WAITING] = _CODE["waiting"]
    codes[(status == WAITING) & (requests["pool"] > 0)] = _CODE["parked"]
    codes[status == RUNNING] = _CODE["running"]
    codes[moving & ((status == WAITING) | (status == RUNNING))] = _CODE["moving"]
    codes[status == IDLE] = _CODE["idle"]
    codes[status == FINISHED] = _CODE["scoring"]
    scored = status == SCORED
    codes[scored] = _CODE["finished"]
    codes[scored & (groups["status"][requests["group"]] == LEASED)] = _CODE["leased"]
    return codes


def longest_idle_s(state: State, now_s: float) -> float:
    """Returns for how long the session that waits longest has waited for its environment, or 0 without one."""
    since = state.requests["idle_s"][state.requests["status"] == IDLE]
    return max(0.0, now_s - float(since.min())) if len(since) else 0.0
