"""A version that its first workers refuse, event by event: who tries it, when it is rejected, how it comes back."""

from typing import Any

from dora.core import commands as do
from dora.core import events as on
from dora.core.dispatcher import Dispatcher
from dora.core.rules import rejection
from dora.core.state import Refusal, SuspectVersion
from dora.errors import Conflict, IllegalTransition, VersionRejected
from tests.refusals import refused
from tests.unit.test_machine import Bench


class Publications(Bench):
    """A bench whose version 1 is published, and whose commands to load it wait."""

    def __init__(self, *workers: str, **options: Any) -> None:
        super().__init__(**options)
        self.start(*workers)
        self.offer(32)
        self.fill(0)
        self.post(on.StepCommitted(1, 0))

    def fill(self, step: int) -> None:
        """Streams a step and completes groups, whichever run, until it is full."""
        self.post(on.StepRequested(1, step))
        while self.state.stream_step == step:
            owned = [row for worker in self.state.workers.values() for row in sorted(worker.rows)]
            self.complete(self.state.request_id[owned[0]])

    def loads(self, version: int) -> list[do.LoadVersion]:
        """Commands to load this version that are on their way."""
        pending = [pending.command for pending in self.state.pending.values()]
        return [command for command in pending if isinstance(command, do.LoadVersion) and command.version == version]

    def empty(self, *names: str) -> None:
        """Ends all work of these workers, so that they may change version."""
        for name in names:
            while self.state.workers[name].rows or self.state.workers[name].inbound:
                self.obey(do.ReserveSlot)
                for copy in [p.command for p in self.state.pending.values() if isinstance(p.command, do.CopyOut)]:
                    self.answer(copy, ok=False, error_kind="not_movable")
                for row in sorted(self.state.workers[name].rows):
                    self.complete(self.state.request_id[row])

    def refuse(self, load: do.LoadVersion, difference: float = 2.0) -> list[do.Command]:
        return self.answer(
            load, ok=False, error="the canary differs", error_kind="weights", canary_difference=difference
        )

    def reject(self, version: int) -> None:
        """Every worker that is told to load the version refuses it, until it is rejected."""
        while version not in self.state.rejected:
            loads = self.loads(version)
            if loads:
                self.refuse(loads[0])
            else:
                self.go_back()
                second = (
                    self.state.suspects[version].second if version in self.state.suspects else self.targeting(version)
                )
                self.empty(second)

    def targeting(self, version: int) -> str:
        return next(worker.worker_id for worker in self.state.workers.values() if worker.target == version)

    def go_back(self) -> None:
        """Loads of version 0, which is good, succeed."""
        for load in self.loads(0):
            self.answer(load)


def test_two_workers_reject_a_version_and_none_is_replaced() -> None:
    bench = Publications("w0", "w1", "w2")
    bench.reject(1)
    (told,) = bench.given(do.RejectVersion)
    assert (told.version, len(told.worker_ids), told.canary_difference) == (1, 2, 2.0)
    assert not bench.given(do.EvictWorker) and bench.machine.counters.versions_rejected == 1
    bench.load_all()
    assert {worker.hosts for worker in bench.state.workers.values()} == {0}, "all are back at the version before"
    assert not bench.loads(1)


def test_while_a_version_is_in_doubt_one_other_worker_tries_it() -> None:
    bench = Publications("w0", "w1", "w2", "w3")
    bench.empty("w0", "w1", "w2", "w3")
    first, *others = bench.loads(1) or [None]
    assert first is not None
    bench.refuse(first)
    suspect = bench.state.suspects[1]
    assert suspect.second not in ("", first.worker_id)
    bench.go_back()
    bench.post(on.RebalanceRequested())
    assert {load.worker_id for load in bench.loads(1)} <= {suspect.second, *(load.worker_id for load in others)}
    assert bench.state.workers[suspect.second].target == 1, "a plan does not take it off"
    assert bench.state.window.admissible(1) == 0


def test_a_second_worker_that_loads_it_well_clears_the_version() -> None:
    """A worker that refused it tries again as planned; a second refusal is its own fault, and it is replaced."""
    bench = Publications("w0", "w1")
    while not bench.loads(1):
        bench.empty(bench.targeting(1))
    liar = bench.loads(1)[0].worker_id
    bench.refuse(bench.loads(1)[0])
    bench.go_back()
    second = bench.state.suspects[1].second
    bench.empty(second)
    bench.answer(next(load for load in bench.loads(1) if load.worker_id == second))
    assert not bench.state.suspects and 1 in bench.state.proven and not bench.state.window.quarantined
    worker = bench.state.workers[liar]
    for _ in range(3):
        bench.state.workers[liar].target = 1
        bench.state.rehosted(worker)
        bench.empty(liar)
        bench.post(on.Tick())
        loads = [load for load in bench.loads(1) if load.worker_id == liar]
        if loads:
            bench.refuse(loads[0])
    assert [evict.worker_id for evict in bench.given(do.EvictWorker)] == [liar]
    assert not bench.given(do.RejectVersion)


def test_the_only_worker_rejects_alone() -> None:
    bench = Publications("w0", window=1)
    bench.refuse(bench.loads(1)[0])
    assert 1 in bench.state.rejected and not bench.loads(1), "in a window of 1 nothing is left to load"
    bench.post(on.VersionRepublished(1, 1))
    bench.load_all()
    assert bench.state.workers["w0"].hosts == 1


def test_a_second_that_dies_leaves_the_word_to_who_is_left() -> None:
    bench = Publications("w0", "w1", window=1)
    first, second = bench.loads(1)
    bench.refuse(first)
    bench.post(on.WorkerLost(second.worker_id, second.epoch, "killed"))
    assert 1 in bench.state.rejected


def test_all_die_in_doubt_and_the_version_is_tried_again() -> None:
    bench = Publications("w0", "w1", window=1)
    first, second = bench.loads(1)
    bench.refuse(first)
    for load in (first, second):
        bench.state.workers[load.worker_id].draining = load is first  # else its loss would leave one that has refused
        bench.post(on.WorkerLost(load.worker_id, load.epoch, "killed"))
    assert 1 in bench.state.suspects and not bench.state.rejected
    bench.join(first.worker_id)
    (again,) = bench.loads(1)
    bench.answer(again)
    assert not bench.state.suspects and bench.state.workers[first.worker_id].hosts == 1


def test_a_fault_of_the_workers_own_speaks_against_the_worker_alone() -> None:
    bench = Publications("w0", "w1", window=1)
    load = bench.loads(1)[0]
    for _ in range(3):
        bench.answer(next(each for each in bench.loads(1) if each.worker_id == load.worker_id), ok=False, error="disk")
    assert not bench.state.suspects and [evict.worker_id for evict in bench.given(do.EvictWorker)] == [load.worker_id]


def test_the_model_itself_cannot_be_published_anew() -> None:
    bench = Bench()
    bench.join("w0")
    for _ in range(3):
        bench.answer(bench.given(do.LoadVersion)[-1], ok=False, error="unfit", error_kind="weights")
    assert bench.given(do.EvictWorker) and not bench.state.suspects


def test_what_is_refused_until_it_is_published_anew_and_what_goes_on_then() -> None:
    bench = Publications("w0", "w1", "w2")
    bench.post(on.StepRequested(1, 1))
    bench.reject(1)
    assert bench.state.stream_step is None
    for event in (on.StepRequested(1, 1), on.StepCommitted(1, 1)):
        with refused(VersionRejected, field="version", value=1):
            bench.post(event)
    with refused(Conflict, field="trainer_epoch", value=0):
        bench.post(on.VersionRepublished(0, 1))
    with refused(Conflict, field="version", value=0, names=("1",)):
        bench.post(on.VersionRepublished(1, 0))
    before = bench.machine.counters.groups_taken
    bench.load_all()
    bench.empty("w0")  # older versions go on, and no step takes what they finish
    assert bench.machine.counters.groups_taken == before
    bench.post(on.VersionRepublished(1, 1))
    with refused(Conflict, field="version", value=1):
        bench.post(on.VersionRepublished(1, 1))
    bench.fill(1)
    assert bench.state.window.step == 2
    bench.post(on.StepCommitted(1, 1))


def test_groups_of_a_rejected_version_wait_in_line_and_go_on() -> None:
    """A strategy may admit before any worker has the weights; the groups stay bound, and nothing joins them."""
    bench = Publications("w0", "w1")
    dispatcher = Dispatcher(bench.state)
    entry = dispatcher.backlog.first()
    assert entry is not None
    dispatcher.admit(entry, 1)
    bench.state.out.clear()
    (group,) = [row for row in bench.state.group_id if bench.state.groups["version"][row] == 1]
    bench.reject(1)
    for _ in range(3):
        bench.load_all()
        bench.post(on.RebalanceRequested())
        bench.post(on.Tick())
    rows = bench.state.members[group]
    assert list(bench.state.waiting[1]) == rows and not bench.loads(1)
    with refused(IllegalTransition, field="version", value=1):
        Dispatcher(bench.state).admit(entry, 1)
    bench.post(on.VersionRepublished(1, 1))
    bench.empty(bench.targeting(1))
    bench.load_all()
    owner = bench.state.owner(rows[0])
    assert owner is not None and owner.hosts == 1


def test_a_load_that_began_before_the_new_weights_counts_for_nothing() -> None:
    bench = Publications("w0", "w1", "w2", window=1)
    first, second, third = bench.loads(1)
    bench.refuse(first)
    bench.refuse(second)
    bench.post(on.VersionRepublished(1, 1))
    assert not bench.machine.counts_load(third.worker_id, 1)
    bench.answer(third)  # what it has read nobody knows
    assert bench.state.workers[third.worker_id].loaded == -1 and 1 not in bench.state.proven
    again = [load for load in bench.loads(1) if load.worker_id == third.worker_id]
    assert len(again) == 1 and bench.machine.counts_load(third.worker_id, 1)
    bench.load_all()
    assert {worker.hosts for worker in bench.state.workers.values()} == {1}


def test_a_load_that_ends_after_the_rejection_counts_for_nothing() -> None:
    bench = Publications("w0", "w1", "w2", window=1)
    first, second, third = bench.loads(1)
    bench.refuse(first)
    bench.refuse(second)
    bench.answer(third)
    assert bench.state.workers[third.worker_id].hosts == -1 and 1 in bench.state.rejected


def test_two_versions_may_be_rejected_at_once() -> None:
    """Version 2 is published before a worker has said what it makes of version 1. The oldest is asked for first."""
    bench = Publications("w0", "w1", "w2", window=4)
    bench.fill(1)
    bench.post(on.StepCommitted(1, 1))
    bench.reject(1)
    bench.reject(2)
    assert sorted(bench.state.rejected) == [1, 2] and not bench.given(do.EvictWorker)
    for version in (1, 2):
        with refused(VersionRejected, field="version", names=(version,)):
            bench.post(on.StepRequested(1, 2))
        bench.post(on.VersionRepublished(1, version))
    bench.post(on.StepRequested(1, 2))


def test_who_tried_a_version_that_is_rejected_tries_the_other_one_in_doubt_at_once() -> None:
    """Found as a seed: the other version was looked at first, while this worker was still taken."""
    bench = Publications("w0", "w1", window=4)
    bench.fill(1)
    bench.post(on.StepCommitted(1, 1))
    state = bench.state
    refusals = {name: Refusal(state.workers[name].epoch, "the canary differs", 2.0) for name in ("w0", "w1")}
    state.suspects[1] = SuspectVersion({"w0": refusals["w0"]})
    state.suspects[2] = SuspectVersion(refusals, second="w1")
    for version in state.suspects:
        state.window.quarantine(version)
    rejection.judge(state)
    assert list(state.rejected) == [2] and state.suspects[1].second == "w1" and state.workers["w1"].target == 1


def test_a_load_without_an_end_is_ended() -> None:
    """Its version, and every later one, would be kept for as long."""
    bench = Publications("w0", "w1")
    while not bench.loads(1):
        bench.empty(bench.targeting(1))
    stuck = bench.loads(1)[0].worker_id
    bench.now_s += bench.state.config.workers.load_timeout_s - 1.0
    bench.post(on.Tick())
    assert not bench.given(do.EvictWorker)
    bench.now_s += 1.0
    bench.post(on.Tick())
    (evicted,) = bench.given(do.EvictWorker)
    assert evicted.worker_id == stuck and evicted.reason == "version 1 was not loaded in 60 s"
    bench.post(on.Tick())
    assert len(bench.given(do.EvictWorker)) == 1


def test_a_version_that_was_let_go_while_it_was_loaded_is_in_no_doubt() -> None:
    bench = Bench()
    bench.start("w0", "w1")
    state = bench.state
    state.window.newest = state.window.step = 6  # the refusal of version 2 comes late
    outcome = on.CommandDone("w0", 1, 1, ok=False, error="the canary differs", error_kind="weights")
    rejection.refused(state, state.workers["w0"], 2, outcome)
    assert not state.suspects and state.replan
    rejection.refused(state, state.workers["w0"], 6, outcome)
    assert set(state.suspects) == {6}
