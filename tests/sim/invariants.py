"""The three promises, checked on the core's state after an event. Each check raises AssertionError with the facts."""

from collections import Counter

from dora.orchestrator.core.handoff import LIVE, Phase
from dora.orchestrator.core.state import GroupStatus, RequestStatus, State

# plain integers: these checks run after every event of every seed
UNFINISHED = {int(RequestStatus.WAITING), int(RequestStatus.RUNNING)}
HELD = {int(GroupStatus.OPEN), int(GroupStatus.FINISHED)}
SCORED = int(RequestStatus.SCORED)


def check_state(state: State) -> None:
    check_window(state)
    check_ownership(state)
    check_groups(state)
    check_capacity(state)


def check_window(state: State) -> None:
    """C3: the state is feasible, and the counts agree with the groups."""
    window = state.window
    assert min(window.slack()) >= 0, f"infeasible: slack {window.slack()} at step {window.step}"
    assert window.newest in (window.step - 1, window.step), f"newest {window.newest} at step {window.step}"
    by_deadline = Counter(
        window.deadline(int(state.groups["version"][row]))
        for row in state.group_id
        if int(state.groups["status"][row]) in HELD
    )
    counted = {window.step + k: n for k, n in enumerate(window._open) if n}
    assert counted == dict(by_deadline), f"open groups {dict(by_deadline)} are counted as {counted}"


def check_ownership(state: State) -> None:
    """C2: each unfinished request is in exactly one place."""
    places: Counter[int] = Counter()
    for worker in state.workers.values():
        places.update(worker.rows)
        assert state.seats[worker.seat] is worker
        for row in worker.rows:
            assert state.requests["worker"][row] == worker.seat + 1
            assert state.requests["status"][row] == RequestStatus.RUNNING
    for version, rows in state.waiting.items():
        places.update(rows)
        for row in rows:
            assert state.requests["status"][row] == RequestStatus.WAITING
            assert state.requests["version"][row] == version
    for row, handoff in state.handoffs.items():
        assert handoff.phase in LIVE and state.requests["moving"][row], (handoff.phase, row)
        if handoff.phase is Phase.STRANDED:
            places[row] += 1
    for row, request_id in state.request_id.items():
        unfinished = int(state.requests["status"][row]) in UNFINISHED
        assert places[row] == int(unfinished), f"{request_id} is in {places[row]} places"


def check_groups(state: State) -> None:
    """Counts of unfinished and unscored responses agree with the requests; finished groups wait exactly once."""
    queued: Counter[int] = Counter()
    for rows in state.finished.values():
        queued.update(rows)
    queued.update(state.leased)
    for group, rows in state.members.items():
        status = [int(state.requests["status"][row]) for row in rows]
        unfinished = sum(value in UNFINISHED for value in status)
        unscored = sum(value != SCORED for value in status)
        assert state.groups["unfinished"][group] == unfinished
        assert state.groups["unscored"][group] == unscored
        assert queued[group] == int(unscored == 0), f"{state.group_id[group]} is queued {queued[group]} times"


def check_capacity(state: State) -> None:
    for worker in state.workers.values():
        assert worker.inbound == sum(h.target == worker.worker_id for h in state.handoffs.values())
        claims = sum(int(state.requests["claim"][row]) for row in worker.rows)
        inbound = sum(
            int(state.requests["claim_inbound"][row])
            for row, handoff in state.handoffs.items()
            if handoff.target == worker.worker_id
        )
        assert worker.kv_claimed == claims + inbound, f"{worker.worker_id} claims {worker.kv_claimed}"


def fingerprint(state: State) -> dict[str, str]:
    """All of the state but the clock, to see whether a refused event has changed anything."""
    plain = {name: repr(value) for name, value in vars(state).items() if name not in ("now_s", "window", "lengths")}
    tables = {"requests": state.requests, "groups": state.groups}
    columns = {name: repr([column.tobytes() for column in table._columns.values()]) for name, table in tables.items()}
    return {**plain, **columns, "window": repr(vars(state.window)), "lengths": repr(vars(state.lengths))}
