"""Sessions in the core: turns, idle KV, time limits and replacements, event by event."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dora.core import Machine
from dora.core import commands as do
from dora.core import events as on
from dora.core.rules import restoring, sessions
from dora.core.state import IDLE, RUNNING, WAITING
from dora.errors import Conflict, InvalidValue, NotFound
from dora.lab.sim.invariants import check_empty, check_state
from tests.refusals import refused
from tests.unit.test_machine import Bench

S = "g0.0"


class SessionBench(Bench):
    """Two workers ``w0`` and ``w1`` of version 0, and one session."""

    def __init__(self, workers: tuple[str, ...] = ("w0", "w1"), sessions: Any = None, **balance: Any) -> None:
        super().__init__(groups=1, **balance)
        if sessions:
            limits = self.machine.state.config.sessions.model_copy(update=sessions)
            self.machine = Machine(self.machine.state.config.model_copy(update={"sessions": limits}))
            self.state = self.machine.state
        self.start(*workers)
        self.open(1)
        self.obey(do.StartRequest)

    def open(self, count: int, group_size: int = 1) -> None:
        prompts = tuple(
            on.OfferedPrompt(f"s{self.prompts + n}", "task", 5, group_size, 60, sessions=True) for n in range(count)
        )
        self.prompts += count
        self.post(on.PromptsOffered(prompts))

    @property
    def row(self) -> int:
        return self.state.request_row[S]

    @property
    def status(self) -> int:
        return int(self.state.requests["status"][self.row])

    def turn(self, tokens: int = 7) -> list[do.Command]:
        return self.report(S, tokens, end=True)

    def ask(self, tokens: int = 3) -> list[do.Command]:
        return self.post(on.TurnRequested(S, tokens))

    def later(self, seconds: float) -> list[do.Command]:
        self.now_s += seconds
        return self.post(on.Tick())

    def grant_move(self, tokens: int = 7) -> None:
        """The target of the handoff reserves, the source copies, the target has it."""
        self.obey(do.ReserveSlot)
        (copy,) = [p.command for p in self.state.pending.values() if isinstance(p.command, do.CopyOut)]
        self.answer(copy, locator="snapshot", tokens=tokens)
        self.obey(do.CopyIn)
        self.obey(do.RemoveRequest)


def test_a_turn_ends_without_an_end_and_the_next_begins_where_the_kv_is() -> None:
    bench = SessionBench()
    home = bench.owner(S)
    assert not bench.turn() and bench.status == IDLE
    worker = bench.state.workers[home]
    assert (worker.assigned, worker.kept, worker.kv_claimed) == (0, {bench.row}, 12), "no slot, and its KV is counted"
    (extend,) = bench.ask(3)
    assert isinstance(extend, do.ExtendRequest) and (extend.worker_id, extend.request_id) == (home, S)
    assert bench.status == RUNNING and bench.state.requests["tokens"][bench.row] == 10
    assert not bench.owns(home, worker.epoch, S), "what it reported before it has obeyed is of the turn before"
    bench.answer(extend)
    assert bench.report(S, 12, end=True) == [] and bench.status == IDLE
    (score,) = bench.post(on.SessionEnded(S))[-1:]
    assert score == do.ScoreRequest(S) and bench.given(do.RemoveRequest)[-1].worker_id == home
    bench.post(on.StepRequested(1, 0))
    bench.post(on.RequestScored(S))
    assert bench.given(do.DeliverGroup)


def test_a_single_answer_stays_one() -> None:
    bench = Bench(groups=1)
    bench.start("w0")
    bench.offer(1)
    assert type(bench.report("g0.0", 7, end=True)[0]) is do.ScoreRequest
    with refused(NotFound, field="session", value="g0.0"):
        bench.post(on.TurnRequested("g0.0", 3))


@pytest.mark.parametrize("event", [on.TurnRequested(S, 3), on.TurnRequested("g9.0", 3), on.SessionEnded("g9.0")])
def test_a_turn_that_nothing_waits_for_is_refused(event: Any) -> None:
    bench = SessionBench()  # its first turn has not ended
    kind, field = (Conflict, "session") if event.request_id == S else (NotFound, "session")
    with refused(kind, field=field, value=event.request_id):
        bench.post(event)


def test_ends_and_turns_after_the_end_are_refused() -> None:
    bench = SessionBench()
    with refused(Conflict, field="session", value=S):
        bench.post(on.SessionEnded(S))  # it has no token
    bench.turn()
    with refused(InvalidValue, field="tokens", value=0):
        bench.ask(0)
    bench.post(on.SessionEnded(S))
    for event in (on.TurnRequested(S, 3), on.SessionEnded(S), on.SessionFailed(S, "late")):
        with refused(Conflict, field="session", value=S):
            bench.post(event)


def test_the_loss_of_the_worker_in_tool_time_costs_a_prefill_and_no_turn() -> None:
    bench = SessionBench()
    home = bench.owner(S)
    bench.turn()
    bench.post(on.WorkerLost(home, bench.state.workers[home].epoch, "killed"))
    assert bench.status == IDLE and not bench.owner(S)
    (start,) = bench.ask(3)
    assert isinstance(start, do.StartRequest) and (start.arrival, start.version) == ("re-prefilled", 0)
    assert bench.machine.counters.turns_reprefilled == 1


def test_an_idle_session_moves_and_its_turn_asked_meanwhile_goes_on_there() -> None:
    bench = SessionBench()
    home = bench.owner(S)
    other = "w1" if home == "w0" else "w0"
    bench.turn()
    bench.post(on.MigrationRequested(S, other))
    bench.obey(do.ReserveSlot)
    assert bench.ask(3) == [] and bench.status == WAITING
    (copy,) = bench.given(do.CopyOut)
    bench.answer(copy, locator="snapshot", tokens=7)
    commands = bench.answer(bench.given(do.CopyIn)[-1])
    assert [(each.worker_id, each.request_id) for each in commands if isinstance(each, do.ExtendRequest)] == [
        (other, S)
    ]
    assert bench.owner(S) == other and bench.status == RUNNING


def test_a_handoff_that_fails_leaves_the_session_where_it_was() -> None:
    bench = SessionBench()
    home = bench.owner(S)
    bench.turn()
    bench.post(on.MigrationRequested(S, "w1" if home == "w0" else "w0"))
    bench.obey(do.ReserveSlot)
    bench.ask(3)
    commands = bench.answer(bench.given(do.CopyOut)[-1], ok=False, error_kind="refused")
    assert any(isinstance(each, do.ExtendRequest) and each.worker_id == home for each in commands)


def test_kv_rests_in_a_pool_after_the_time_to_live_and_comes_back() -> None:
    bench = SessionBench(("w0",))
    bench.post(on.PoolJoined("pool-0", 1, 1000))
    bench.turn()
    assert not bench.later(1.0) and bench.later(60.0)
    bench.grant_move()
    pool, worker = bench.state.pools["pool-0"], bench.state.workers["w0"]
    assert bench.status == IDLE and pool.rows == {bench.row} and worker.kv_claimed == 0
    bench.ask(3)
    bench.obey(do.ReserveSlot)
    bench.answer(bench.given(do.Resume)[-1], locator="back", tokens=7)
    commands = bench.answer(bench.given(do.CopyIn)[-1])
    assert any(isinstance(each, do.ExtendRequest) for each in commands) and bench.status == RUNNING
    assert bench.machine.counters.migrations_reprefill == 0


def test_a_session_whose_pool_is_lost_is_prefilled() -> None:
    bench = SessionBench(("w0",))
    bench.post(on.PoolJoined("pool-0", 1, 1000))
    bench.turn()
    bench.later(60.0)
    bench.grant_move()
    bench.post(on.PoolLost("pool-0", 1, "killed"))
    assert bench.status == IDLE and not bench.state.requests["pool"][bench.row]
    bench.ask(3)
    assert bench.given(do.StartRequest)[-1].arrival == "re-prefilled"


def test_a_version_keeps_its_last_worker_while_a_session_is_open() -> None:
    """The first group's session is idle when version 1 comes: w0 takes version 1, and not both do."""
    bench = SessionBench()
    bench.open(1, 1)
    bench.obey(do.StartRequest)
    bench.turn()
    bench.post(on.StepRequested(1, 0))
    bench.report("g1.0", 7, end=True)
    bench.post(on.SessionEnded("g1.0"))
    bench.post(on.RequestScored("g1.0"))
    bench.post(on.StepCommitted(1, 0))
    for _ in range(3):
        bench.load_all()
        bench.later(30.0)
    assert 0 in {worker.target for worker in bench.state.workers.values()}
    assert not bench.given(do.RetireVersion)


def test_a_worker_that_lacks_the_session_prefills_it() -> None:
    bench = SessionBench(("w0",))
    bench.turn()
    (extend,) = bench.ask(3)
    commands = bench.answer(extend, ok=False, error_kind="unknown_request")
    assert [(type(each), each.arrival) for each in commands if isinstance(each, do.StartRequest)] == [
        (do.StartRequest, "re-prefilled")
    ]


@pytest.mark.parametrize("limit", [{"idle_timeout_s": 20.0}, {"total_timeout_s": 20.0, "idle_timeout_s": 0.0}])
def test_a_silent_session_is_replaced_and_at_last_broken_off(limit: dict[str, float]) -> None:
    bench = SessionBench(("w0",), sessions={**limit, "replacements": 1})
    bench.turn()
    assert not [each for each in bench.later(10.0) if isinstance(each, do.ReplaceRequest)]
    (replaced,) = [each for each in bench.later(20.0) if isinstance(each, do.ReplaceRequest)]
    assert (replaced.request_id, replaced.replacement_id) == (S, "g0.0~1") and S not in bench.state.request_row
    assert bench.report("g0.0~1", 9, end=True) == []
    (broken,) = [each for each in bench.later(40.0) if isinstance(each, do.BreakOffSession)]
    assert broken.request_id == "g0.0~1" and broken.reason
    bench.post(on.StepRequested(1, 0))
    bench.post(on.RequestScored("g0.0~1"))
    assert bench.given(do.DeliverGroup), "the group is whole: one member, once"
    counters = bench.machine.counters
    assert (counters.sessions_replaced, counters.sessions_broken_off) == (1, 1)


def test_on_timeout_end_breaks_off_at_once() -> None:
    bench = SessionBench(("w0",), sessions={"idle_timeout_s": 20.0, "on_timeout": "end"})
    bench.turn()
    assert any(isinstance(each, do.BreakOffSession) for each in bench.later(30.0))


def test_a_session_without_a_token_that_fails_too_often_takes_its_group_with_it() -> None:
    bench = SessionBench(("w0",), sessions={"replacements": 0})
    bench.post(on.SessionFailed(S, "no sandbox"))
    (dropped,) = bench.given(do.DropGroup)
    assert "no sandbox" in dropped.reason
    check_empty_but_commands(bench)


def test_the_fault_of_another_session_is_not_charged() -> None:
    """Whatever number of times; then the session's own failures count as before."""
    bench, name = SessionBench(("w0",), sessions={"replacements": 1}), S
    bench.turn()
    for attempt in range(1, 5):
        bench.post(on.SessionFailed(name, "another ended its process", "another"))
        name = f"{S}~{attempt}"
        assert bench.given(do.ReplaceRequest)[-1].replacement_id == name
    bench.post(on.SessionFailed(name, "it died"))
    bench.report(f"{S}~5", 9, end=True)
    bench.post(on.SessionFailed(f"{S}~5", "another ended its process", "another"))
    bench.report(f"{S}~6", 9, end=True)
    assert not bench.given(do.BreakOffSession)
    bench.post(on.SessionFailed(f"{S}~6", "it died"))
    assert bench.given(do.BreakOffSession)[-1].request_id == f"{S}~6"


def test_replacements_end_where_the_journal_cannot_count_them() -> None:
    bench, name = SessionBench(("w0",)), S
    for attempt in range(1, sessions.ATTEMPTS_MAX + 1):
        bench.post(on.SessionFailed(name, "another ended its process", "another"))
        name = f"{S}~{attempt}"
    bench.post(on.SessionFailed(name, "another ended its process", "another"))
    (dropped,) = bench.given(do.DropGroup)
    assert "another" in dropped.reason


def test_the_fault_of_its_prompt_cancels_a_group_with_the_reason() -> None:
    bench = SessionBench(("w0",))
    bench.turn()
    bench.post(on.SessionFailed(S, "p0 ended two processes", "prompt"))
    (dropped,) = bench.given(do.DropGroup)
    assert dropped.reason == f"{S}: p0 ended two processes"
    check_empty_but_commands(bench)


def test_a_cancelled_group_frees_idle_sessions() -> None:
    bench = SessionBench(("w0",))
    bench.turn()
    bench.post(on.GroupCancelled("g0", "asked for"))
    assert bench.given(do.RemoveRequest)[-1].request_id == S and not bench.state.workers["w0"].kept
    check_empty_but_commands(bench)


def check_empty_but_commands(bench: Bench) -> None:
    bench.obey(do.WorkerCommand)
    check_empty(bench.state)


def test_a_waiting_request_takes_the_kv_of_an_idle_session() -> None:
    """A worker's KV is full of an idle session's, and the next prompt finds a slot and no room."""
    bench = SessionBench(())
    bench.post(on.WorkerJoined("w0", 9, 8, 40))
    bench.load_all()
    bench.post(on.StepRequested(1, 0))
    bench.obey(do.StartRequest)
    bench.post(on.Progress("w0", 9, 0, {S: 30}, {S: "stop"}, 0, 35))
    bench.open(1)
    removed, started = bench.given(do.RemoveRequest), bench.given(do.StartRequest)
    assert [each.request_id for each in removed] == [S] and started[-1].request_id == "g1.0"
    assert bench.status == IDLE


def test_a_restarted_core_knows_idle_sessions_and_their_attempts() -> None:
    bench = SessionBench(("w0",), sessions={"replacements": 1})
    bench.turn()
    bench.post(on.SessionFailed(S, "it died"))
    bench.report("g0.0~1", 9, end=True)
    durable = restoring.durable(bench.state)
    joined = on.WorkerJoined("w0", 7, 8, 100_000, version=0, requests={"g0.0~1": 9})
    again = Machine(bench.state.config)
    again.handle(replace(durable, workers=(joined,)), 1.0)
    check_state(again.state)
    row = again.state.request_row["g0.0~1"]
    assert again.state.requests["status"][row] == IDLE and again.state.workers["w0"].kept == {row}
    (extend,) = again.handle(on.TurnRequested("g0.0~1", 3), 2.0)
    assert isinstance(extend, do.ExtendRequest)


@pytest.mark.parametrize(("held", "kept"), [(7, True), (6, False), (10, False), (12, False)])
def test_a_reattached_worker_keeps_a_session_only_at_the_same_token(held: int, kept: bool) -> None:
    bench = SessionBench(("w0",))
    bench.turn(7)
    durable = restoring.durable(bench.state)
    again = Machine(bench.state.config)
    joined = on.WorkerJoined("w0", 7, 8, 100_000, version=0, requests={S: held})
    commands = again.handle(replace(durable, workers=(joined,)), 1.0)
    check_state(again.state)
    assert bool(again.state.workers["w0"].kept) is kept
    assert any(isinstance(each, do.RemoveRequest) for each in commands) is not kept


def test_a_session_whose_turn_waits_at_one_reattached_worker_is_not_adopted_by_another() -> None:
    """The second began the turn, by a handoff of which the first still had its copy (fault seed 364 of one_step)."""
    bench = SessionBench()
    bench.turn(7)
    bench.ask(3)
    durable = restoring.durable(bench.state)
    asked = replace(durable.requests, given=np.array([3], np.int32))
    again = Machine(bench.state.config)
    first = on.WorkerJoined("w0", 7, 8, 100_000, version=0, requests={S: 7})
    second = on.WorkerJoined("w1", 8, 8, 100_000, version=0, requests={S: 12})
    commands = again.handle(replace(durable, requests=asked, workers=(first, second)), 1.0)
    check_state(again.state)
    row = again.state.request_row[S]
    assert row in again.state.workers["w0"].rows and not again.state.workers["w1"].rows
    assert [each.worker_id for each in commands if isinstance(each, do.RemoveRequest)] == ["w1"]


# --------------------------------------------------------------------------------------------------- prompts and forks


class EmptyBench(SessionBench):
    """One session whose environment gives the prompt."""

    def open(self, count: int, group_size: int = 1) -> None:
        prompts = tuple(on.OfferedPrompt(f"s{n}", "task", 0, group_size, 60, sessions=True) for n in range(count))
        self.prompts += count
        self.post(on.PromptsOffered(prompts))


def test_a_session_without_a_prompt_is_idle_until_its_first_turn_brings_it() -> None:
    bench = EmptyBench()
    assert bench.status == IDLE and not bench.given(do.StartRequest)
    with refused(Conflict, field="session", value=S):
        bench.ask(3)
    (start,) = bench.post(on.TurnRequested(S, 6, is_prompt=True))
    assert isinstance(start, do.StartRequest) and start.arrival == "new"
    columns = bench.state.requests
    assert (columns["prompt_tokens"][bench.row], columns["tokens"][bench.row], bench.status) == (6, 0, RUNNING)
    bench.answer(start)
    bench.turn(4)
    assert isinstance(bench.ask(2)[0], do.ExtendRequest) and bench.machine.counters.turns_forked == 0
    check_state(bench.state)


def test_a_session_whose_environment_gives_no_prompt_is_replaced_by_one_that_waits_for_it() -> None:
    bench = EmptyBench(sessions={"idle_timeout_s": 10.0, "replacements": 1})
    (replaced,) = [each for each in bench.later(11.0) if isinstance(each, do.ReplaceRequest)]
    assert replaced.replacement_id == f"{S}~1"
    assert bench.state.requests["status"][bench.state.request_row[f"{S}~1"]] == IDLE
    (dropped,) = [each for each in bench.later(11.0) if isinstance(each, do.DropGroup)]
    assert "no turn was requested" in dropped.reason
    check_empty(bench.state)


@pytest.mark.parametrize("event", [on.TurnRequested(S, 2, after_tokens=4), on.TurnRequested(S, 9, is_prompt=True)])
def test_a_fork_frees_the_kv_of_the_branch_that_it_leaves(event: on.TurnRequested) -> None:
    bench = SessionBench()
    home = bench.owner(S)
    bench.turn(7)
    sent = bench.post(event)
    assert [type(each) for each in sent] == [do.RemoveRequest, do.StartRequest] and sent[0].worker_id == home
    columns = bench.state.requests
    found = (int(columns["prompt_tokens"][bench.row]), int(columns["tokens"][bench.row]))
    assert found == ((9, 0) if event.is_prompt else (5, 6))
    assert sent[1].arrival == ("new" if event.is_prompt else "re-prefilled")
    assert bench.machine.counters.turns_forked == 1
    check_state(bench.state)


RETRY = on.TurnRequested(S, 2, after_tokens=4, is_on_branch=True)


def check_extended(bench: SessionBench, worker_id: str) -> None:
    """The fork continues on this worker, with 5 tokens of its prompt, 4 of its branch and 2 given ones."""
    extend = bench.given(do.ExtendRequest)[-1]
    assert (extend.worker_id, extend.request_id, bench.status) == (worker_id, S, RUNNING)
    columns, counters = bench.state.requests, bench.machine.counters
    assert [int(columns[name][bench.row]) for name in ("tokens", "input_tokens", "left")] == [6, 0, 0]
    assert (counters.turns_forked, counters.turns_resumed, counters.turns_reprefilled) == (1, 1, 0)
    check_state(bench.state)
    bench.answer(extend)
    assert bench.report(S, 9, end=True) == [] and bench.status == IDLE


def test_a_fork_of_the_present_branch_continues_where_its_kv_is() -> None:
    bench = SessionBench()
    home = bench.owner(S)
    bench.turn(7)
    worker = bench.state.workers[home]
    worker.kv_used, worker.kv_change = 12, 0
    assert [type(each) for each in bench.post(RETRY)] == [do.ExtendRequest]
    assert worker.kv_expected == 11, "a prompt of 5 tokens and 6 response tokens"
    check_extended(bench, home)


def test_the_branch_that_a_fork_leaves_counts_until_the_fork_begins() -> None:
    """All slots are taken. The fork waits with the KV of its branch, and goes first."""
    bench = SessionBench(())
    bench.post(on.WorkerJoined("w0", 9, 1, 100_000))
    bench.load_all()
    bench.obey(do.StartRequest)
    bench.turn(7)
    bench.post(on.StepRequested(1, 0))
    bench.open(1)
    bench.obey(do.StartRequest)
    assert bench.owner("g1.0") == "w0" and bench.post(RETRY) == []
    worker = bench.state.workers["w0"]
    assert bench.status == WAITING and bench.state.kv_of(bench.row) == 12 and worker.waiting_turns.keys() == {bench.row}
    check_state(bench.state)
    bench.report("g1.0", 3, end=True)
    check_extended(bench, "w0")


def test_a_fork_of_a_branch_that_moves_continues_at_its_target() -> None:
    bench = SessionBench()
    home = bench.owner(S)
    other = "w1" if home == "w0" else "w0"
    bench.turn(7)
    bench.post(on.MigrationRequested(S, other))
    bench.obey(do.ReserveSlot)
    assert bench.post(RETRY) == [] and bench.status == WAITING and bench.state.kv_of(bench.row) == 12
    bench.answer(bench.given(do.CopyOut)[-1], locator="snapshot", tokens=7)
    bench.answer(bench.given(do.CopyIn)[-1])
    check_extended(bench, other)


def test_a_fork_of_a_parked_branch_continues_where_it_is_resumed() -> None:
    bench = SessionBench(("w0",))
    bench.post(on.PoolJoined("pool-0", 1, 1000))
    bench.turn(7)
    bench.later(60.0)
    bench.grant_move()
    bench.post(RETRY)
    bench.obey(do.ReserveSlot)
    bench.answer(bench.given(do.Resume)[-1], locator="back", tokens=7)
    bench.answer(bench.given(do.CopyIn)[-1])
    check_extended(bench, "w0")


@pytest.mark.parametrize("how", ["worker", "pool", "move", "unknown"])
def test_a_fork_whose_kv_is_lost_is_prefilled_whole(how: str) -> None:
    bench = SessionBench(("w0",))
    bench.post(on.PoolJoined("pool-0", 1, 1000))
    bench.turn(7)
    if how in ("pool", "move"):
        bench.later(60.0)
    if how == "pool":
        bench.grant_move()
    elif how == "move":
        bench.obey(do.ReserveSlot)
    sent = bench.post(RETRY)
    if how == "pool":
        bench.post(on.PoolLost("pool-0", 1, "killed"))
    elif how == "unknown":
        bench.answer(sent[0], ok=False, error_kind="unknown_request")
    else:
        bench.post(on.WorkerLost("w0", bench.state.workers["w0"].epoch, "killed"))
        bench.post(on.WorkerJoined("w0", 99, 8, 100_000, version=0))
    assert bench.given(do.StartRequest)[-1].arrival == "re-prefilled"
    assert bench.status == RUNNING and not bench.state.requests["left"][bench.row]
    check_state(bench.state)


def test_a_restarted_core_prefills_a_fork_whole() -> None:
    """A worker that comes back has the branch that was left, which the service does not believe it to continue."""
    bench = SessionBench(())
    bench.post(on.WorkerJoined("w0", 9, 1, 100_000))
    bench.load_all()
    bench.obey(do.StartRequest)
    bench.turn(7)
    bench.post(on.StepRequested(1, 0))
    bench.open(1)
    bench.post(RETRY)
    joined = on.WorkerJoined("w0", 10, 8, 100_000, version=0)
    again = Machine(bench.state.config)
    commands = again.handle(replace(restoring.durable(bench.state), workers=(joined,)), 1.0)
    assert S in [each.request_id for each in commands if isinstance(each, do.StartRequest)]
    check_state(again.state)


def test_a_fork_in_the_middle_of_a_move_undoes_it() -> None:
    bench = SessionBench()
    home = bench.owner(S)
    bench.turn(7)
    other = "w1" if home == "w0" else "w0"
    bench.post(on.MigrationRequested(S, other))
    bench.obey(do.ReserveSlot)
    sent = bench.post(on.TurnRequested(S, 2, after_tokens=3))
    assert bench.row not in bench.state.handoffs and isinstance(sent[-1], do.StartRequest)
    check_state(bench.state)


@pytest.mark.parametrize(
    "event",
    [
        on.TurnRequested(S, 2, after_tokens=-2),
        on.TurnRequested(S, 2, after_tokens=1, is_prompt=True),
        on.TurnRequested(S, 2, is_on_branch=True),
        on.TurnRequested(S, 2, after_tokens=8, is_on_branch=True),
    ],
)
def test_a_fork_from_nowhere_is_refused(event: on.TurnRequested) -> None:
    bench = SessionBench()
    bench.turn(7)
    with refused(InvalidValue, field="after_tokens"):
        bench.post(event)
    assert bench.status == IDLE
    check_state(bench.state)


def test_a_restart_restores_sessions_without_a_prompt_and_prompts_of_their_own() -> None:
    bench = EmptyBench()
    waiting = restoring.durable(bench.state)
    again = Machine(bench.state.config)
    again.handle(waiting, 1.0)
    assert again.state.requests["status"][again.state.request_row[S]] == IDLE
    bench.post(on.TurnRequested(S, 6, is_prompt=True))
    bench.obey(do.StartRequest)
    bench.turn(4)
    begun = Machine(bench.state.config)
    begun.handle(restoring.durable(bench.state), 1.0)
    row = begun.state.request_row[S]
    assert begun.state.requests["prompt_tokens"][row] == 6 and begun.state.requests["tokens"][row] == 4
