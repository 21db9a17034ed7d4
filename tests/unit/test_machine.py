"""The core by hand: single histories, event by event, each of which once went wrong."""

from typing import Any

import numpy as np
import pytest

from dora.config import WindowSize, validated
from dora.core import Machine
from dora.core import commands as do
from dora.core import events as on
from dora.core.handoff.table import VACATING, Phase
from dora.data.limits import GROUPS_MAX
from dora.errors import InvalidValue, NotFound
from dora.lab.sim.invariants import check_state
from tests.refusals import refused


class Bench:
    """A machine, and the commands it has given; ``done`` answers commands in order, all as wanted."""

    def __init__(
        self, window: WindowSize = 2, groups: int = 2, redundant: float = 0.0, service: Any = None, **balance: Any
    ) -> None:
        selection = {"redundant_fraction": redundant}
        tree = {"window": {"size": window}, "balance": balance, "selection": selection, "service": service or {}}
        self.machine = Machine(validated(tree))
        self.state = self.machine.state
        self.groups = groups
        self.now_s = 0.0
        self.commands: list[do.Command] = []
        self.epochs = 0
        self.prompts = 0

    def post(self, event: on.Event) -> list[do.Command]:
        self.now_s += 0.01
        commands = self.machine.handle(event, self.now_s)
        check_state(self.state)
        self.commands += commands
        return commands

    def given(self, kind: type) -> list[Any]:
        return [command for command in self.commands if isinstance(command, kind)]

    def join(self, name: str, slots: int = 8, host: str = "") -> None:
        self.epochs += 1
        self.post(on.WorkerJoined(name, self.epochs, slots, 100_000, host))

    def answer(self, command: do.WorkerCommand, **outcome: Any) -> list[do.Command]:
        return self.post(on.CommandDone(command.worker_id, command.epoch, command.command_id, **outcome))

    def obey(self, kind: type) -> None:
        """Every command of this kind that is on its way succeeds."""
        while found := [p.command for p in self.state.pending.values() if isinstance(p.command, kind)]:
            self.answer(found[0])

    def load_all(self) -> None:
        self.obey(do.LoadVersion)

    def start(self, *names: str) -> None:
        for name in names:
            self.join(name)
        self.load_all()
        self.post(on.TrainerAttached(1, self.groups))

    def move(self) -> None:
        """Begins a handoff of g0.0 from w0 to w1, which has reserved a slot for it."""
        self.start("w0")
        self.offer(1)
        self.obey(do.StartRequest)
        self.join("w1")
        self.load_all()
        self.post(on.MigrationRequested("g0.0", "w1"))
        self.obey(do.ReserveSlot)

    def offer(self, count: int, group_size: int = 1, exhausted: bool = False) -> None:
        first, self.prompts = self.prompts, self.prompts + count
        prompts = tuple(on.OfferedPrompt(f"p{i}", "task", 5, group_size, 60) for i in range(first, first + count))
        self.post(on.PromptsOffered(prompts, exhausted))

    def owner(self, request_id: str) -> str:
        owner = self.state.owner(self.state.request_row[request_id])
        return owner.worker_id if owner else ""

    def owns(self, worker_id: str, epoch: int, request_id: str) -> bool:
        """Whether a report of this worker on this request counts."""
        rows = np.array([self.state.request_row[request_id]])
        return bool(self.machine.owned(worker_id, epoch, rows).all())

    def report(self, request_id: str, tokens: int, *, end: bool = False) -> list[do.Command]:
        self.obey(do.StartRequest)
        worker = self.state.workers[self.owner(request_id)]
        ends = {request_id: "stop"} if end else {}
        used = 10 * (len(worker.rows) - end)
        return self.post(
            on.Progress(worker.worker_id, worker.epoch, worker.loaded, {request_id: tokens}, ends, 0, used)
        )

    def complete(self, request_id: str) -> None:
        self.report(request_id, 7, end=True)
        self.post(on.RequestScored(request_id))


def test_the_newest_version_is_kept_for_workers_that_join_before_the_next() -> None:
    """W = 1: once step 0 is full no group can be of version 0, yet a worker that joins now must load something."""
    bench = Bench(window=1)
    bench.start("w0")
    bench.offer(2)
    bench.post(on.StepRequested(1, 0))
    for request_id in ("g0.0", "g1.0"):
        bench.complete(request_id)
    assert bench.given(do.CloseStep) and not bench.given(do.RetireVersion)
    bench.join("w1")
    assert [load.version for load in bench.given(do.LoadVersion)] == [0, 0]
    bench.load_all()
    bench.post(on.StepCommitted(1, 0))
    assert [gone.version for gone in bench.given(do.RetireVersion)] == [0]


def test_a_version_is_kept_while_a_worker_loads_it() -> None:
    bench = Bench(window=1)
    bench.start("w0")
    bench.offer(2)
    bench.post(on.StepRequested(1, 0))
    bench.join("w1")
    (load,) = [load for load in bench.given(do.LoadVersion) if load.worker_id == "w1"]
    for request_id in ("g0.0", "g1.0"):
        bench.complete(request_id)
    bench.post(on.StepCommitted(1, 0))
    assert not bench.given(do.RetireVersion)
    bench.answer(load, ok=False, error="slow disk")
    assert [gone.version for gone in bench.given(do.RetireVersion)] == [0]
    bench.load_all()
    assert {worker.hosts for worker in bench.state.workers.values()} == {1}, "w1 gave its old target up"


def test_an_idle_worker_is_planned_for_once_not_at_every_report() -> None:
    """Version 1 admits no more and version 0 has one long response: the second worker has nothing to do, either way."""
    bench = Bench(window=2, groups=2)
    bench.start("w0", "w1")
    bench.offer(32)
    bench.post(on.StepRequested(1, 0))
    for request_id in ("g0.0", "g1.0", "g2.0"):
        bench.complete(request_id)
    bench.report("g3.0", 9)
    bench.post(on.StepCommitted(1, 0))
    bench.load_all()
    for request_id in ("g4.0", "g5.0"):
        bench.complete(request_id)
    bench.post(on.RebalanceRequested())
    bench.load_all()
    before = bench.machine.counters.rebalances
    for tokens in range(10, 60):
        bench.report("g3.0", tokens)
    assert bench.machine.counters.rebalances == before


def test_a_worker_whose_old_version_comes_too_late_for_more_gets_the_newest_at_once() -> None:
    """The window admits more of version 0, but no response to a prompt could end before its last step is full."""
    bench = Bench(window=3, groups=2, policy="dora", period_s=1000)
    bench.join("w0", slots=1)
    bench.join("w1", slots=1)
    bench.load_all()
    bench.post(on.TrainerAttached(1, 2))
    bench.offer(32)
    for step, request_ids in enumerate((("g0.0", "g2.0"), ("g1.0", "g4.0"))):
        bench.post(on.StepRequested(1, step))
        for request_id in request_ids:
            bench.complete(request_id)
            bench.load_all()
        bench.post(on.StepCommitted(1, step))
        bench.load_all()
    bench.now_s += 100.0
    assert bench.owner("g3.0") == "w0" and bench.state.workers["w0"].loaded == 0
    bench.complete("g3.0")
    assert bench.state.window.admissible(0) > 0 and bench.state.workers["w0"].target == 2


def test_the_end_of_a_frozen_response_is_taken_from_its_owner() -> None:
    bench = Bench()
    bench.start("w0", "w1")
    bench.offer(1)
    source = bench.owner("g0.0")
    target = "w1" if source == "w0" else "w0"
    bench.obey(do.StartRequest)
    bench.post(on.MigrationRequested("g0.0", target))
    bench.answer(bench.given(do.ReserveSlot)[0])
    bench.answer(bench.given(do.CopyOut)[0], locator="snapshot", tokens=3)
    commands = bench.report("g0.0", 9, end=True)
    assert [type(command) for command in commands][:3] == [do.CancelReservation, do.ReleaseSnapshot, do.ScoreRequest]
    assert not bench.state.handoffs
    bench.answer(bench.given(do.CopyIn)[0])  # the target had taken it in meanwhile
    assert bench.owner("g0.0") == ""


def copied_ahead(began: bool) -> tuple[Bench, str, str]:
    """A handoff whose source was told to copy; ``began``: it copies ahead. The bench, source and target."""
    bench = Bench()
    bench.start("w0", "w1")
    bench.offer(1)
    source = bench.owner("g0.0")
    target = "w1" if source == "w0" else "w0"
    bench.obey(do.StartRequest)
    bench.post(on.MigrationRequested("g0.0", target))
    bench.answer(bench.given(do.ReserveSlot)[0])
    (handoff,) = bench.state.handoffs.values()
    assert handoff.phase is Phase.RESERVED and handoff.reason == "operator"
    if began:
        copy_out = bench.given(do.CopyOut)[0]
        for _ in range(2):  # a message may come twice
            assert bench.post(on.CopyBegan(source, copy_out.epoch, copy_out.command_id)) == []
        assert handoff.phase is Phase.COPYING
    return bench, source, target


@pytest.mark.parametrize("began", [False, True])
def test_a_copy_ends_alike_before_and_after_it_ran_ahead(began: bool) -> None:
    bench, source, target = copied_ahead(began)
    bench.answer(bench.given(do.CopyOut)[0], locator="snapshot", tokens=3)
    bench.obey(do.CopyIn)
    assert bench.owner("g0.0") == target
    bench, source, target = copied_ahead(began)  # the target's refusal of a round
    bench.answer(bench.given(do.CopyOut)[0], ok=False, error="refused", error_kind="refused")
    assert {type(command) for command in bench.commands} >= {do.CancelReservation, do.Thaw}
    assert bench.owner("g0.0") == source and not bench.state.handoffs
    bench, source, target = copied_ahead(began)
    bench.report("g0.0", 9, end=True)
    assert bench.given(do.CancelReservation) and not bench.given(do.Thaw) and not bench.state.handoffs
    bench, source, target = copied_ahead(began)
    bench.now_s += bench.state.config.balance.handoff_timeout_s
    (handoff,) = bench.state.handoffs.values()
    bench.post(on.Tick())
    assert bench.given(do.CancelReservation) and bench.given(do.Thaw) and bench.owner("g0.0") == source
    assert "longer than" in handoff.overdue
    bench, source, target = copied_ahead(began)
    bench.post(on.WorkerLost(target, bench.state.workers[target].epoch, "killed"))
    assert bench.given(do.Thaw) and bench.owner("g0.0") == source
    bench, source, target = copied_ahead(began)
    bench.post(on.WorkerLost(source, bench.state.workers[source].epoch, "killed"))
    assert bench.given(do.CancelReservation) and bench.owner("g0.0") == target, "it resumes there by re-prefill"


@pytest.mark.parametrize(
    ("error_kind", "counter"), [("refused", "migrations_failed"), ("unknown_request", "migrations_overtaken")]
)
def test_a_copy_that_fails_is_told_from_one_whose_response_had_ended(error_kind: str, counter: str) -> None:
    bench, _, _ = copied_ahead(True)
    before = getattr(bench.state.counters, counter)
    bench.answer(bench.given(do.CopyOut)[0], ok=False, error="why", error_kind=error_kind)
    assert getattr(bench.state.counters, counter) == before + 1


def test_a_copys_beginning_of_an_epoch_that_is_over_is_ignored() -> None:
    bench, source, _ = copied_ahead(False)
    copy_out = bench.given(do.CopyOut)[0]
    assert bench.post(on.CopyBegan(source, copy_out.epoch - 1, copy_out.command_id)) == []
    assert bench.post(on.CopyBegan(source, copy_out.epoch, copy_out.command_id + 999)) == []
    (handoff,) = bench.state.handoffs.values()
    assert handoff.phase is Phase.RESERVED


def test_kv_goes_with_a_request_that_moves_before_anyone_reports() -> None:
    """Under laxity on 81 engines that reported every 15 s, moves made all of them look full, and so made more moves."""
    bench = Bench()
    bench.start("w0", "w1")
    bench.offer(4)
    for number in range(4):
        bench.report(f"g{number}.0", 5)  # 10 tokens of context each, as the engine says
    used = {name: worker.kv_expected for name, worker in bench.state.workers.items()}
    source = bench.owner("g0.0")
    target = "w1" if source == "w0" else "w0"
    bench.post(on.MigrationRequested("g0.0", target))
    bench.obey(do.ReserveSlot)
    bench.answer(bench.given(do.CopyOut)[-1], locator="snapshot", tokens=5)
    bench.obey(do.CopyIn)
    assert bench.owner("g0.0") == target
    workers = bench.state.workers
    assert workers[source].kv_expected == used[source] - 10
    assert workers[target].kv_expected == used[target] + 10


def test_reports_of_an_earlier_stay_on_the_same_worker_do_not_count() -> None:
    """w1 had taken the request in when the handoff was undone, and decoded a little. Then the source died, and the
    request was started on w1: what w1 reports before it has obeyed that is not what will be resumed there."""
    bench = Bench(handoff_timeout_s=5.0)
    bench.move()
    bench.answer(bench.given(do.CopyOut)[0], locator="snapshot", tokens=3)
    bench.now_s += 6.0
    bench.post(on.Tick())
    bench.post(on.WorkerLost("w0", 1, "killed"))
    start = bench.given(do.StartRequest)[-1]
    assert (start.worker_id, bench.owner("g0.0")) == ("w1", "w1")
    stale = on.Progress("w1", 2, 0, {"g0.0": 9}, {"g0.0": "stop"})
    assert not bench.owns("w1", 2, "g0.0")
    assert bench.post(stale) == []
    assert bench.owner("g0.0") == "w1"
    bench.answer(start)
    assert bench.owns("w1", 2, "g0.0")


def test_an_exhausted_source_leaves_no_worker_to_a_version_without_prompts() -> None:
    bench = Bench(window=2, groups=2)
    bench.start("w0", "w1")
    bench.offer(4, exhausted=True)
    bench.post(on.StepRequested(1, 0))
    for request_id in ("g0.0", "g1.0"):
        bench.complete(request_id)
    bench.post(on.StepCommitted(1, 0))
    bench.load_all()
    assert [worker.target for worker in bench.state.workers.values()] == [0, 0]


@pytest.mark.parametrize("drained_first", [True, False])
def test_a_drained_service_ends_the_step_short(drained_first: bool) -> None:
    bench = Bench(groups=4)
    bench.start("w0")
    bench.offer(3)
    if drained_first:
        bench.post(on.AdmissionEnded())
    bench.post(on.StepRequested(1, 0))
    for request_id in ("g0.0", "g1.0"):
        bench.complete(request_id)
    if not drained_first:
        bench.post(on.AdmissionEnded())
    bench.post(on.GroupCancelled("g2", "asked for"))
    assert [close.exhausted for close in bench.given(do.CloseStep)] == [True]
    bench.post(on.StepCommitted(1, 0))
    bench.post(on.StepRequested(1, 1))
    assert [close.exhausted for close in bench.given(do.CloseStep)] == [True, True]
    assert not bench.state.group_row


def test_a_refused_move_is_not_tried_again_at_once() -> None:
    """w1 hosts version 1 and will not take what is to leave w0: without a rest the two would talk of nothing else."""
    bench = Bench(window=2, groups=2)
    bench.start("w0", "w1", "w2")
    bench.offer(12)
    bench.obey(do.StartRequest)
    bench.post(on.DrainRequested("w0"))
    tries = 0
    while reserves := [p.command for p in bench.state.pending.values() if isinstance(p.command, do.ReserveSlot)]:
        bench.answer(reserves[0], ok=False, error_kind="refused")
        tries += 1
        assert tries <= 12, "the same moves again and again"
    assert tries > 0
    bench.now_s += 6.0
    bench.post(on.Tick())
    bench.obey(do.ReserveSlot)
    assert bench.given(do.CopyOut), "tried again after a while"


def test_streamrl_sees_a_line_that_changed_and_is_as_long_as_before() -> None:
    """Found by the sweep. While nobody hosts the version, one request comes back to the line, another is cancelled."""
    bench = Bench(window=2, groups=3, policy="streamrl")
    bench.join("w0", slots=1)
    bench.load_all()
    bench.post(on.TrainerAttached(1, 3))
    bench.offer(3)
    bench.post(on.WorkerLost("w0", 1, "killed"))
    bench.post(on.GroupCancelled("g1", "asked for"))
    bench.join("w0", slots=3)
    bench.load_all()
    assert {bench.owner("g0.0"), bench.owner("g2.0")} == {"w0"}


def test_an_evicted_worker_counts_as_lost_and_a_drained_one_does_not() -> None:
    bench = Bench(window=2, groups=1)
    for name in ("w0", "w1"):
        bench.join(name)
    for attempt in range(3):
        loads = [command for command in bench.given(do.LoadVersion) if command.worker_id == "w0"]
        bench.answer(loads[attempt], ok=False, error="no room")
    (evicted,) = bench.given(do.EvictWorker)
    bench.post(on.WorkerLost("w0", evicted.epoch, evicted.reason))
    assert bench.state.counters.workers_lost == 1
    bench.join("w2")
    bench.load_all()
    bench.post(on.DrainRequested("w1"))
    (stopped,) = bench.given(do.StopWorker)
    bench.post(on.WorkerLost("w1", stopped.epoch, "drained"))
    assert bench.state.counters.workers_lost == 1


@pytest.mark.parametrize("groups", [0, GROUPS_MAX + 1, 4_000_000_000])
def test_a_trainer_with_an_impossible_batch_is_refused(groups: int) -> None:
    """Two steps' worth of prompts are drawn at once."""
    bench = Bench(window=2, groups=1)
    with refused(InvalidValue, field="groups_per_step"):
        bench.post(on.TrainerAttached(1, groups))


def both_loading() -> tuple[Bench, list[do.LoadVersion]]:
    """Two workers load version 0, and there are prompts for 16 requests."""
    bench = Bench(window=2, groups=2, policy="dora")
    for name in ("w0", "w1"):
        bench.join(name, slots=32)
    bench.post(on.TrainerAttached(1, 2))
    bench.offer(4, group_size=4)
    return bench, bench.given(do.LoadVersion)


def test_the_first_to_have_a_version_leaves_an_even_share_to_those_that_load_it() -> None:
    bench, loads = both_loading()
    bench.answer(loads[0])
    assert len(bench.given(do.StartRequest)) == 8
    bench.answer(loads[1])
    assert len(bench.given(do.StartRequest)) == 16
    assert len(bench.state.workers["w1"].rows) == 8


def test_the_share_of_a_worker_that_is_lost_while_it_loads_goes_to_the_others() -> None:
    bench, loads = both_loading()
    bench.answer(loads[0])
    bench.post(on.WorkerLost("w1", loads[1].epoch, "killed"))
    assert len(bench.state.workers["w0"].rows) == 16


def test_a_look_for_moves_that_found_no_place_is_repeated_when_there_is_one() -> None:
    """Each worker holds three requests of 35 tokens; w0 is to leave. Room is made by what ends on w1."""
    bench = Bench(window=3, groups=2, policy="dora", predictor="oracle")
    for name in ("w0", "w1"):
        bench.epochs += 1
        bench.post(on.WorkerJoined(name, bench.epochs, 8, 120))
    bench.load_all()
    bench.post(on.TrainerAttached(1, 2))
    prompts = tuple(on.OfferedPrompt(f"p{i}", "task", 5, 1, 60, known_tokens=(40,)) for i in range(6))
    bench.post(on.PromptsOffered(prompts, True))
    bench.obey(do.StartRequest)
    held = {name: [r for r in bench.state.request_row if bench.owner(r) == name] for name in ("w0", "w1")}
    assert {name: len(requests) for name, requests in held.items()} == {"w0": 3, "w1": 3}
    bench.now_s += 1.0
    for epoch, (name, requests) in enumerate(held.items(), start=1):
        bench.post(on.Progress(name, epoch, 0, dict.fromkeys(requests, 30), {}, 0, 105))
    bench.post(on.DrainRequested("w0"))
    for request_id, used in zip(held["w1"], (80, 45), strict=False):
        bench.now_s += 1.0
        assert not bench.given(do.ReserveSlot)
        bench.post(on.Progress("w1", 2, 0, {request_id: 40}, {request_id: "stop"}, 0, used))
    assert [handoff.reason for handoff in bench.state.handoffs.values()] == [VACATING]
    assert len(bench.given(do.ReserveSlot)) == 1, "one of 35 tokens beside 45, where 108 are the pressure"


def test_a_worker_that_nobody_knows_is_answered_with_the_nearest() -> None:
    bench = Bench()
    with refused(NotFound, field="worker_id", value="w01"):
        bench.post(on.DrainRequested("w01"))
    for number in range(30):
        bench.join(f"w{number}")
    with refused(NotFound, field="worker_id", value="w01", names=("26",)):
        bench.post(on.DrainRequested("w01"))
