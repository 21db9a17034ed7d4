"""Evaluations, event by event: what they take of workers, what they give back, and how they end."""

from typing import Any

import pytest

from dora.config import validated
from dora.core import commands as do
from dora.core import events as on
from dora.core.rules.evaluation import EVALUATIONS_MAX, UNHOSTED_S
from dora.errors import Conflict, InvalidValue, NotFound
from dora.orchestrator.version_memory import weight_versions
from tests.refusals import refused
from tests.unit.test_machine import Bench


class Evaluating(Bench):
    """A bench that asks for evaluations too."""

    def ask(self, name: str = "e1", prompts: int = 4, group_size: int = 1, **fields: Any) -> list[do.Command]:
        offered = tuple(on.OfferedPrompt(f"q{i}", "task", 5, group_size, 60) for i in range(prompts))
        return self.post(on.EvaluationRequested(name, offered, **fields))

    def train(self, step: int) -> None:
        """A step of one group is filled and committed; workers load what they are to host."""
        self.offer(1)
        self.obey(do.StartRequest)
        self.post(on.StepRequested(1, step))
        self.complete(f"g{step}.0")
        self.post(on.StepCommitted(1, step))
        self.load_all()

    def end_evaluation(self) -> None:
        """All requests of evaluations end, and those that keep a worker from them."""
        for request_id in [*self.state.request_row]:
            self.complete(request_id)
        self.load_all()
        while held := [name for name, each in self.state.evaluations.requests.items() if each.worker_id]:
            self.evaluate(held[0])

    def evaluated_by(self, worker_id: str) -> int:
        return self.state.evaluations.count(worker_id)

    def evaluate(self, request_id: str, tokens: int = 7, *, end: bool = True, version: int | None = None) -> None:
        """The worker that runs it delivers so many tokens of it; at its end it is scored."""
        self.obey(do.StartRequest)
        worker = self.state.workers[self.state.evaluations.requests[request_id].worker_id]
        sampled = worker.loaded if version is None else version
        ends = {request_id: "stop"} if end else {}
        self.post(on.Progress(worker.worker_id, worker.epoch, sampled, {request_id: tokens}, ends, 0, tokens))
        if end:
            self.post(on.RequestScored(request_id))


def test_idle_slots_are_used_and_given_back_as_soon_as_training_wants_them() -> None:
    bench = Evaluating(window=2, groups=16)
    bench.start("w0")
    bench.ask(prompts=20)
    assert bench.evaluated_by("w0") == 8, "all slots of the worker"
    bench.evaluate("e1.5.0", 5, end=False)
    before = len(bench.commands)
    bench.offer(3)
    at_once = [
        command for command in bench.commands[before:] if isinstance(command, do.RemoveRequest | do.StartRequest)
    ]
    assert [type(command) for command in at_once] == [do.RemoveRequest] * 3 + [do.StartRequest] * 3
    assert {command.request_id for command in at_once[:3]} == {"e1.5.0", "e1.6.0", "e1.7.0"}, "the youngest"
    assert bench.evaluated_by("w0") == 5 and bench.state.evaluations.running["e1"].preempted == 3
    bench.evaluate("e1.0.0")
    resumed = bench.given(do.StartRequest)[-1]
    assert (resumed.request_id, resumed.arrival) == ("e1.5.0", "re-prefilled"), "with the tokens that it had"
    assert bench.machine.counters.groups_admitted == 3, "no evaluation is among them"


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_a_share_is_lent_whatever_training_wants_and_no_more(share: float) -> None:
    bench = Evaluating(window=2, groups=64)
    bench.start("w0", "w1")
    bench.ask(prompts=100, share=share)
    bench.offer(64)
    for worker in bench.state.workers.values():
        assert worker.lent_slots == bench.evaluated_by(worker.worker_id) == max(1, int(8 * share))
        assert len(worker.rows) <= worker.slots == 8 - worker.lent_slots
    bench.post(on.EvaluationCancelled("e1", "enough"))
    assert bench.given(do.EndEvaluation) == [do.EndEvaluation("e1", "enough")]
    assert [worker.slots for worker in bench.state.workers.values()] == [8, 8]
    assert not bench.state.evaluations.lent


def test_a_group_ends_with_its_last_verdict_and_an_evaluation_with_its_last_group() -> None:
    bench = Evaluating()
    bench.start("w0")
    bench.ask(prompts=2, group_size=2)
    for request_id in ("e1.0.0", "e1.1.0", "e1.1.1"):
        bench.evaluate(request_id)
        bench.post(on.RequestScored(request_id))  # told twice: it counts once
    assert bench.given(do.EndEvaluationGroup) == [do.EndEvaluationGroup("e1", "e1.1")] and not bench.given(
        do.EndEvaluation
    )
    bench.evaluate("e1.0.1")
    assert bench.given(do.EndEvaluation) == [do.EndEvaluation("e1")]


def test_a_dead_workers_requests_go_on_elsewhere_after_what_was_delivered() -> None:
    bench = Evaluating()
    bench.start("w0", "w1")
    bench.ask(prompts=16)
    bench.evaluate("e1.0.0", 5, end=False)
    lost = bench.state.evaluations.requests["e1.0.0"].worker_id
    bench.post(on.WorkerLost(lost, bench.state.workers[lost].epoch, "killed"))
    (other,) = bench.state.workers
    assert bench.evaluated_by(other) == 8 and len(bench.state.evaluations.running["e1"].waiting) == 8
    bench.evaluate(next(iter(bench.state.evaluations.placed[other])))
    assert bench.given(do.StartRequest)[-1].request_id == "e1.0.0"


def test_a_token_of_another_version_is_never_taken_and_its_worker_is_replaced() -> None:
    bench = Evaluating()
    bench.start("w0")
    bench.ask()
    bench.evaluate("e1.0.0", version=1, end=False)
    assert bench.given(do.EvictWorker) and bench.machine.counters.c1_violations == 1
    assert bench.state.evaluations.requests["e1.0.0"].tokens == 0


def published(bench: Evaluating, *, offer: int = 0) -> None:
    """Step 0 is trained, and version 1 published; ``offer``: prompts that wait then."""
    for request_id in ("g0.0", "g1.0"):
        bench.complete(request_id)
    if offer:
        bench.offer(offer)
    bench.post(on.StepCommitted(1, 0))
    for _ in range(3):
        bench.obey(do.StartRequest)
        bench.load_all()
        bench.post(on.RebalanceRequested())


def before_publication(workers: int) -> Evaluating:
    bench = Evaluating(window=3, groups=2)
    bench.start(*(f"w{number}" for number in range(workers)))
    bench.offer(2)
    bench.post(on.StepRequested(1, 0))
    return bench


def targets(bench: Evaluating) -> list[int]:
    return [worker.target for worker in bench.state.workers.values()]


@pytest.mark.parametrize(("share", "old"), [(0.5, 2), (0.25, 1), (0.0, 1)])
def test_a_share_keeps_so_many_workers_with_the_version(share: float, old: int) -> None:
    """The rest of version 0 takes one worker of four."""
    bench = before_publication(4)
    bench.ask(prompts=200, share=share)
    published(bench, offer=8)
    assert sorted(targets(bench)) == [0] * old + [1] * (4 - old)
    bench.post(on.EvaluationCancelled("e1", "enough"))
    bench.post(on.RebalanceRequested())
    assert sorted(targets(bench)) == [0, 1, 1, 1]


def test_workers_with_nothing_to_do_get_the_newest_version_where_only_an_evaluation_wants_it() -> None:
    bench = before_publication(4)
    bench.ask(prompts=200)
    published(bench)
    assert targets(bench) == [0] * 4, "no prompt waits"
    bench.ask("e2")
    assert targets(bench) == [0] * 4, "they evaluate version 0"
    bench.post(on.EvaluationCancelled("e1", "enough"))
    assert targets(bench) == [1] * 4
    bench.load_all()
    for number in range(4):
        bench.evaluate(f"e2.{number}.0")
    assert bench.given(do.EndEvaluation)[1:] == [do.EndEvaluation("e2")]


def test_an_evaluation_of_an_old_version_that_nobody_hosts_gets_a_worker() -> None:
    bench = Evaluating(window=3, groups=2)
    bench.start("w0")
    bench.offer(2)
    bench.post(on.StepRequested(1, 0))
    bench.ask(prompts=20)
    for request_id in ("g0.0", "g1.0"):
        bench.complete(request_id)
    bench.post(on.StepCommitted(1, 0))
    bench.load_all()
    bench.now_s += UNHOSTED_S / 2
    bench.post(on.Tick())
    assert targets(bench) == [1] and bench.state.evaluations.running["e1"].placed == 0
    bench.now_s += UNHOSTED_S
    bench.post(on.Tick())
    assert targets(bench) == [0]
    bench.post(on.RebalanceRequested())
    assert targets(bench) == [0], "it is kept"
    bench.end_evaluation()
    assert bench.given(do.EndEvaluation) == [do.EndEvaluation("e1")]
    bench.post(on.Tick())
    assert targets(bench) == [1]


def test_a_version_stays_until_its_evaluation_is_done_and_nothing_of_it_is_admitted() -> None:
    bench = Evaluating(window=1, groups=1)
    bench.start("w0", "w1")
    bench.ask(prompts=10)
    for step in range(3):
        bench.train(step)
    window = bench.state.window
    assert bench.given(do.PinVersion) == [do.PinVersion(0)] and bench.state.pinned == {0} and bench.state.retired == 3
    assert window.oldest_kept == 3 and window.admissible(0) == 0, "C3: no step may train on it"
    assert [command.version for command in bench.given(do.RetireVersion)] == [1, 2]
    bench.ask("e2", prompts=1, version=0)
    assert bench.given(do.EndEvaluation) == []
    for _ in range(3):
        bench.now_s += UNHOSTED_S
        bench.post(on.Tick())
        bench.load_all()
    bench.end_evaluation()
    assert bench.given(do.EndEvaluation) == [do.EndEvaluation("e1"), do.EndEvaluation("e2")]
    bench.post(on.Tick())
    assert bench.given(do.RetireVersion)[-1] == do.RetireVersion(0) and not bench.state.pinned
    with refused(NotFound, field="version", value=0):
        bench.ask("e3", version=0)


@pytest.mark.parametrize("most", [0, 1, 2])
def test_so_many_versions_are_kept_and_no_more(most: int) -> None:
    bench = Evaluating(window=1, groups=1, service={"evaluation_versions": most})
    bench.start("w0")
    for step in range(3):
        bench.ask(f"e{step}", prompts=200)
        bench.train(step)
    ended = [command.evaluation_id for command in bench.given(do.EndEvaluation)]
    assert ended == [f"e{step}" for step in range(most, 3)] and bench.state.pinned == set(range(most))
    assert all("service.evaluation_versions" in command.reason for command in bench.given(do.EndEvaluation))


def test_weights_that_evaluations_keep_are_counted_in_the_stores() -> None:
    for settings, versions in (({}, 1), ({"weight_versions": 3}, 0), ({"weight_versions": 4}, 1)):
        assert validated({"window": {"size": 2}, "service": settings}).evaluation_versions == versions
    assert weight_versions(validated({"window": {"size": 2}, "service": {"evaluation_versions": 3}})) == 6


def test_what_cannot_be_is_refused() -> None:
    bench = Evaluating()
    bench.start("w0")
    for number in range(EVALUATIONS_MAX):
        bench.ask(f"e{number}", share=0.05)
    with refused(Conflict, field="evaluation", value="e9", names=("8",)):
        bench.ask("e9")
    bench.post(on.EvaluationCancelled("e0", "enough"))
    with refused(InvalidValue, field="share", value=0.2, names=("0.15", "0.5")):
        bench.ask("e9", share=0.2)
    with refused(InvalidValue, field="prompts", value="0 responses"):
        bench.ask("e9", prompts=0)
    with refused(NotFound, field="version", value=2):
        bench.ask("e9", version=2)
    with refused(NotFound, field="evaluation_id", value="e0"):
        bench.post(on.EvaluationCancelled("e0", "enough"))
    bench.post(on.AdmissionEnded())
    assert len(bench.given(do.EndEvaluation)) == EVALUATIONS_MAX
    with refused(Conflict, field="evaluation", value="e9"):
        bench.ask("e9")


def test_an_evaluation_whose_old_weights_cannot_be_loaded_ends_and_its_worker_goes_on() -> None:
    bench = Evaluating(window=1, groups=1)
    bench.start("w0")
    bench.ask(prompts=10)
    for step in range(2):
        bench.train(step)
    bench.now_s += 2 * UNHOSTED_S
    bench.post(on.Tick())
    (load,) = [
        pending.command for pending in bench.state.pending.values() if isinstance(pending.command, do.LoadVersion)
    ]
    assert load.version == 0
    bench.answer(load, ok=False, error="no memory", error_kind="refused")
    (end,) = bench.given(do.EndEvaluation)
    assert "could not be loaded: no memory" in end.reason
    bench.load_all()
    assert bench.state.workers["w0"].hosts == 2 and bench.given(do.RetireVersion)[-1] == do.RetireVersion(0)
