"""The reason for which a full window admits nothing: agents, workers or the trainer."""

import time
from typing import Final

import numpy as np

from dora.core.state import GROUP_FINISHED, IDLE, OPEN, RUNNING, WAITING, State
from dora.orchestrator.rollout.presence import clock_time
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.rpc import dora_pb2 as pb
from dora.system.awake import awake_s

OPENED: Final = "open:"  # begins the environment of a group that a client has opened


def window_wait(state: State, buffer: ResponseBuffer, trainer: str) -> pb.WindowWait | None:
    """Returns None if the window has room or is closed. ``trainer`` is the name of the attached one, or empty.

    A step waits for agents if, without the groups of idle sessions, too few groups are left for it or one is due.
    """
    window = state.window
    if window.closed or any(window.admissible(each) > 0 for each in range(window.oldest_live, window.newest + 1)):
        return None
    if state.stream_step is None:
        who = f"the trainer {trainer}, which has to take or commit step {window.newest}"
        return pb.WindowWait(waits_for="trainer", reason=who if trainer else "a trainer: none is attached")
    requests, groups = state.requests, state.groups
    is_open = groups["status"] == OPEN
    idle = np.flatnonzero((requests["status"] == IDLE) & is_open[requests["group"]])
    with_agents = np.unique(requests["group"][idle])
    without = int(np.count_nonzero(is_open | (groups["status"] == GROUP_FINISHED))) - len(with_agents)
    if not len(idle) or (without >= window.left and (groups["deadline"][with_agents] > window.step).all()):
        runs, waits = (int(np.count_nonzero(requests["status"] == each)) for each in (RUNNING, WAITING))
        return pb.WindowWait(waits_for="workers", reason=f"workers: {runs:,} requests run, {waits:,} wait for a worker")
    row = int(idle[np.argmin(requests["idle_s"][idle])])
    response = buffer.at(row)
    since = time.time() - (awake_s() - float(requests["idle_s"][row]))
    environment = response.prompt.environment
    is_opened, name = environment.startswith(OPENED), environment.removeprefix(OPENED)
    whose = f"{'opened as' if is_opened else 'of the environment'} {name}"
    session = f"session {response.request_id} of group {response.group_id}, {whose}"
    more = f"; {len(idle):,} sessions wait for their agents" if len(idle) > 1 else ""
    return pb.WindowWait(
        waits_for="agents",
        reason=f"{session}: its agent has had the turn since {clock_time(since)}{more}",
        group_id=response.group_id,
        session_id=response.request_id,
        environment=environment,
        since=since,
        sessions_idle=len(idle),
    )
