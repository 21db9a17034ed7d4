"""Sessions of evaluations, event by event: slots, pauses, ends, and what time limits and failures do."""

from collections.abc import Mapping
from typing import Any

import pytest

from dora.config import validated
from dora.core import Machine
from dora.core import commands as do
from dora.core import events as on
from dora.errors import Conflict, InvalidValue, NotFound
from tests.refusals import refused
from tests.unit.test_evaluation import Evaluating

SESSION = "e1.0.0"


class Attended(Evaluating):
    """A bench whose evaluations have sessions. ``sessions``: their settings."""

    def __init__(self, sessions: Mapping[str, Any] | None = None, **fields: Any) -> None:
        super().__init__(**fields)
        if sessions:
            tree = self.state.config.model_dump(mode="json")
            self.machine = Machine(validated({**tree, "sessions": dict(sessions)}))
            self.state = self.machine.state

    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        self.post(on.Tick())

    def ask_sessions(self, prompts: int = 1, prompt_tokens: int = 0, group_size: int = 1) -> None:
        offered = tuple(
            on.OfferedPrompt(f"q{i}", "task", prompt_tokens, group_size, 60, sessions=True) for i in range(prompts)
        )
        self.post(on.EvaluationRequested("e1", offered))

    def turn(self, request_id: str, tokens: int) -> None:
        """A turn of the session ends at so many response tokens."""
        self.obey(do.StartRequest)
        worker = self.state.workers[self.state.evaluations.requests[request_id].worker_id]
        ends = {request_id: "stop"}
        self.post(on.Progress(worker.worker_id, worker.epoch, worker.loaded, {request_id: tokens}, ends, 0, tokens))

    @property
    def idle(self) -> list[str]:
        return list(self.state.evaluations.running["e1"].idle)


def attended(**settings: Any) -> Attended:
    bench = Attended(groups=16, sessions={"idle_timeout_s": 100.0, "total_timeout_s": 0.0, **settings})
    bench.start("w0")
    return bench


def test_turns_alternate_with_pauses_without_slot_or_kv() -> None:
    bench = attended()
    bench.ask_sessions()
    assert bench.idle == [SESSION] and bench.evaluated_by("w0") == 0, "the environment brings the prompt"
    bench.post(on.TurnRequested(SESSION, 5, is_prompt=True))
    assert not bench.idle and bench.evaluated_by("w0") == 1
    bench.turn(SESSION, 4)
    assert bench.idle == [SESSION] and bench.evaluated_by("w0") == 0
    assert bench.given(do.RemoveRequest)[-1].request_id == SESSION
    assert bench.state.evaluations.kv_tokens("w0") == 0
    bench.post(on.TurnRequested(SESSION, 3))
    (first, second) = (each for each in bench.given(do.StartRequest) if each.request_id == SESSION)
    assert (first.arrival, second.arrival) == ("new", "re-prefilled")
    assert bench.state.evaluations.requests[SESSION].context == 5 + 4 + 3
    bench.turn(SESSION, 9)
    bench.post(on.TurnRequested(SESSION, 2, after_tokens=4))  # a fork
    assert bench.state.evaluations.requests[SESSION].tokens == 6
    bench.turn(SESSION, 8)
    bench.post(on.SessionEnded(SESSION))
    assert bench.given(do.ScoreEvaluated) == [do.ScoreEvaluated(SESSION)] and not bench.given(do.ScoreRequest)
    bench.post(on.RequestScored(SESSION))
    assert bench.given(do.EndEvaluation) == [do.EndEvaluation("e1")]
    assert bench.machine.counters.groups_admitted == 0 and not bench.state.evaluations.requests


def test_events_that_must_be_refused_change_nothing() -> None:
    bench = attended()
    bench.ask_sessions(prompt_tokens=5)
    bench.ask("e2", prompts=1)
    with refused(Conflict, names=(SESSION,)):
        bench.post(on.TurnRequested(SESSION, 3))  # its first turn runs
    with refused(Conflict, names=(SESSION,)):
        bench.post(on.SessionEnded(SESSION))  # without a token
    with refused(NotFound, names=("e2.0.0",)):
        bench.post(on.TurnRequested("e2.0.0", 3))  # a single answer
    bench.turn(SESSION, 4)
    with refused(InvalidValue, field="tokens", value=0):
        bench.post(on.TurnRequested(SESSION, 0))
    with refused(InvalidValue, field="after_tokens", value=-2):
        bench.post(on.TurnRequested(SESSION, 3, after_tokens=-2))
    bench.post(on.TurnRequested(SESSION, 3))
    bench.post(on.SessionEnded(SESSION))
    with refused(Conflict, names=(SESSION,)):
        bench.post(on.TurnRequested(SESSION, 3))


def test_sessions_that_wait_for_their_environment_are_as_many_as_slots() -> None:
    bench = attended()
    bench.ask_sessions(prompts=30)
    assert len(bench.idle) == bench.state.workers["w0"].slots == 8
    for request_id in bench.idle[:3]:
        bench.post(on.TurnRequested(request_id, 5, is_prompt=True))
    assert len(bench.idle) == 8 and bench.evaluated_by("w0") == 3


def test_a_version_is_kept_while_sessions_of_it_are_idle() -> None:
    bench = Attended(window=1, groups=1)
    bench.start("w0")
    bench.ask_sessions(prompt_tokens=5)
    bench.turn(SESSION, 4)
    bench.train(0)
    assert 0 in bench.state.pinned and not bench.given(do.RetireVersion)
    bench.post(on.EvaluationCancelled("e1", "enough"))
    assert bench.given(do.RetireVersion) == [do.RetireVersion(0)]


@pytest.mark.parametrize("on_timeout", ["replace", "end"])
def test_a_session_that_stands_still_is_replaced_or_ends_without_a_reward(on_timeout: str) -> None:
    bench = attended(on_timeout=on_timeout, replacements=1)
    bench.ask_sessions(prompt_tokens=5)
    bench.turn(SESSION, 4)
    bench.tick(101.0)
    name = SESSION
    if on_timeout == "replace":
        name = f"{SESSION}~1"
        (replaced,) = bench.given(do.ReplaceRequest)
        assert (replaced.request_id, replaced.replacement_id) == (SESSION, name) and "100" in replaced.reason
        bench.turn(name, 6)
        bench.tick(101.0)
    assert bench.given(do.BreakOffSession)[-1].request_id == name
    bench.post(on.RequestScored(name, 0.0, False))
    assert bench.given(do.EndEvaluationGroup) == [do.EndEvaluationGroup("e1", "e1.0")]
    counters = bench.machine.counters
    assert counters.sessions_replaced == counters.sessions_broken_off == 0, "they count sessions of training"


def test_one_that_fails_too_often_without_a_token_ends_its_group_with_the_reason() -> None:
    bench = attended(replacements=1)
    bench.ask_sessions()
    bench.post(on.SessionFailed(SESSION, "no room"))
    assert bench.idle == [f"{SESSION}~1"]
    bench.post(on.SessionFailed(f"{SESSION}~1", "no room"))
    (ended,) = bench.given(do.EndEvaluationGroup)
    assert "no room" in ended.reason and bench.given(do.EndEvaluation) == [do.EndEvaluation("e1")]


def test_the_fault_of_another_session_is_not_charged_and_that_of_the_prompt_ends_the_group() -> None:
    bench = attended(replacements=0)
    bench.ask_sessions()
    bench.post(on.SessionFailed(SESSION, "another ended its process", "another"))
    bench.post(on.SessionFailed(f"{SESSION}~1", "another ended its process", "another"))
    assert bench.idle == [f"{SESSION}~2"]
    bench.post(on.SessionFailed(f"{SESSION}~2", "it ended two processes", "prompt"))
    (ended,) = bench.given(do.EndEvaluationGroup)
    assert "two processes" in ended.reason


def test_time_without_a_slot_is_not_the_sessions() -> None:
    bench = attended(idle_timeout_s=0.0, total_timeout_s=50.0)
    bench.ask_sessions(prompt_tokens=5)
    bench.offer(8)  # training takes all slots
    assert bench.evaluated_by("w0") == 0
    bench.tick(60.0)
    assert not bench.given(do.ReplaceRequest)
    for request_id in [*bench.state.request_row]:
        bench.complete(request_id)
    bench.turn(SESSION, 4)
    bench.tick(60.0)
    assert "50" in bench.given(do.ReplaceRequest)[-1].reason


def test_a_dead_workers_turn_goes_on_elsewhere() -> None:
    bench = attended()
    bench.ask_sessions(prompt_tokens=5)
    bench.turn(SESSION, 4)
    bench.post(on.TurnRequested(SESSION, 3))
    bench.obey(do.StartRequest)
    bench.post(on.WorkerLost("w0", bench.state.workers["w0"].epoch, "killed"))
    bench.join("w1")
    bench.load_all()
    assert bench.state.evaluations.requests[SESSION].worker_id == "w1"
