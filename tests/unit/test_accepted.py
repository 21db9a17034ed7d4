"""A report that the buffer accepts: what is new, what ended, which segments began, and the views of that result."""

import numpy as np
import pytest

from dora.config import RolloutConfig
from dora.data.input_digest import beginning_digest, input_digest
from dora.data.token_spans import TokenColumns, TokenSpan
from dora.data.types import Prompt
from dora.orchestrator.rollout.responses.accepted import BegunSegment
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.orchestrator.rollout.responses.session_paths import runs_of
from dora.orchestrator.rollout.responses.state import ReportError
from dora.orchestrator.rollout.telemetry import Telemetry
from dora.rpc.columns import columns_from_wire, columns_to_wire
from tests.refusals import refused
from tests.turn_orders import order


def reported(*stretches: TokenSpan) -> TokenColumns:
    return columns_from_wire(columns_to_wire(stretches))


@pytest.fixture
def buffer() -> ResponseBuffer:
    """Two responses of a step's group, in rows 0 and 1, and one of an evaluation in row 2."""
    made = ResponseBuffer(RolloutConfig())
    made.admit("g0", Prompt("p0", "", (1,), group_size=2), 0, {"g0.0": 0, "g0.1": 1}, 10.0)
    made.begin("e1.0", Prompt("p1", "", (1,), group_size=1), 0, {"e1.0.0": 2}, 10.0)
    return made


def test_tokens_that_are_held_already_are_no_news(buffer: ResponseBuffer) -> None:
    first = reported(TokenSpan(0, 0, (3, 4), (-1.0, -2.0)), TokenSpan(1, 0, (5,), (-3.0,)))
    assert buffer.accept("w0", 0, first, 11.0).new_tokens == 3
    again = reported(TokenSpan(1, 0, (5,), (-3.0,)), TokenSpan(0, 1, (4, 6), (-2.0, -4.0), "length"))
    accepted = buffer.accept("w0", 0, again, 12.0)
    assert (accepted.new_tokens, accepted.ended, accepted.segments) == (1, ("g0.0",), ())
    assert (accepted.before.tolist(), accepted.after.tolist()) == ([1, 2], [1, 3])
    record = accepted.record()
    assert record is not None, "of what is new alone"
    assert (record.numbers.tolist(), record.first_tokens.tolist(), record.counts.tolist()) == ([0], [2], [1])
    assert (record.token_ids.tolist(), record.logprobs.tolist(), record.ends.tolist()) == ([6], [-4.0], [2])
    event = accepted.event(epoch=7, waiting=1, kv_used_tokens=9)
    assert (event.rows.tolist(), event.tokens.tolist(), event.ends.tolist()) == ([1, 0], [1, 3], [0, 2])
    assert (event.worker_id, event.epoch, event.waiting, event.kv_used_tokens) == ("w0", 7, 1, 9)
    assert buffer["g0.0"].tokens.tolist() == [3, 4, 6] and buffer["g0.0"].finished_at == 12.0


def test_a_report_without_news_leaves_no_record(buffer: ResponseBuffer) -> None:
    told = reported(TokenSpan(0, 0, (3,), (-1.0,)))
    buffer.accept("w0", 0, told, 11.0)
    accepted = buffer.accept("w0", 0, told, 12.0)
    assert accepted.record() is None and not accepted.new_tokens
    assert accepted.event(1, 0, 0).tokens.tolist() == [1], "the core is told how far it is all the same"


def test_an_evaluation_is_accepted_and_not_recorded(buffer: ResponseBuffer) -> None:
    accepted = buffer.accept("w0", 0, reported(TokenSpan(2, 0, (3,), (-1.0,), "stop")), 11.0)
    assert accepted.ended == ("e1.0.0",) and accepted.new_tokens == 1 and accepted.record() is None
    both = buffer.accept("w0", 0, reported(TokenSpan(2, 1, (4,), (-1.0,)), TokenSpan(0, 0, (5, 6), (-1.0, -2.0))), 12.0)
    record = both.record()
    assert record is not None and (record.numbers.tolist(), record.token_ids.tolist()) == ([0], [5, 6])
    assert record.segment_starts == [[0, "w0", 0, "new"]], "by its place in the record"


def test_a_segment_begins_with_the_first_token_on_a_worker(buffer: ResponseBuffer) -> None:
    telemetry = Telemetry()
    begun = buffer.accept("w0", 0, reported(TokenSpan(0, 0, (3, 4), (-1.0, -1.0))), 11.0)
    assert begun.segments == (BegunSegment(0, 0, "new", None, admitted_s=1.0),) and begun.blackouts_ms() == []
    assert begun.first_tokens_s() == [1.0]
    buffer.arrives("g0.0", "w1", "migrated")
    late = buffer.accept("w0", 0, reported(TokenSpan(0, 2, (5,), (-1.0,))), 12.0)
    assert late.segments == (), "the source still reports"
    there = buffer.accept("w1", 0, reported(TokenSpan(0, 3, (6,), (-1.0,))), 12.5)
    assert there.segments == (BegunSegment(0, 3, "migrated", 0.5),) and there.first_tokens_s() == []
    telemetry.accepted(there)
    assert telemetry.counters()["blackout_ms_p50"] == pytest.approx(500.0, rel=0.2) and telemetry.tokens_delivered == 1
    record = there.record()
    assert record is not None and record.segment_starts == [[0, "w1", 3, "migrated"]]
    assert [segment.worker_id for segment in buffer["g0.0"].worker_history()] == ["w0", "w1"]


def test_nothing_of_a_report_that_mixes_versions_is_appended(buffer: ResponseBuffer) -> None:
    """The core is told of the spans that are wrong, and of how far their requests are."""
    buffer.admit("g1", Prompt("p2", "", (1,), group_size=1), 1, {"g1.0": 3}, 10.0)
    mixed = buffer.accept(
        "w0", 0, reported(TokenSpan(0, 0, (3,), (-1.0,)), TokenSpan(3, 0, (4,), (-1.0,), "stop")), 11.0
    )
    assert mixed.is_mixed and mixed.record() is None
    assert (mixed.ended, mixed.segments, mixed.new_tokens) == ((), (), 0)
    event = mixed.event(1, 0, 0)
    assert (event.version, event.rows.tolist(), event.tokens.tolist(), event.ends.tolist()) == (0, [3], [0], [1])
    assert not len(buffer["g0.0"]) and not len(buffer["g1.0"])


def test_nothing_of_a_report_with_a_gap_is_appended(buffer: ResponseBuffer) -> None:
    with refused(ReportError, field="g0.1: first token", value=1):
        buffer.accept("w0", 0, reported(TokenSpan(0, 0, (3,), (-1.0,)), TokenSpan(1, 1, (4,), (-1.0,))), 11.0)
    assert not len(buffer["g0.0"]) and buffer.buffered(np.array([0, 1, 2])).tolist() == [0, 0, 0]


PROMPT = (5, 6, 7)
OF_PROMPT = np.array([-1.0, -2.0], "<f4").tobytes()


@pytest.fixture
def asked() -> ResponseBuffer:
    """A session whose first turn, with a prompt of three tokens, was asked for with prompt logprobs, in row 0."""
    made = ResponseBuffer(RolloutConfig())
    made.admit("g0", Prompt("p0", "", (), group_size=1, environment="e"), 0, {"g0.0": 0}, 10.0)
    record = made.give(order(made["g0.0"], PROMPT, 4, "agent", (0, -3), prompt_logprobs=True), 10.5)
    assert record.turns[0][-1] is True and runs_of([(0, 3, 10.5, *record.turns[0][1:])]) == made["g0.0"].inputs
    return made


def test_prompt_logprobs_come_with_the_first_token(asked: ResponseBuffer) -> None:
    entry = asked["g0.0"]
    assert entry.owes_prompt and entry.spec().prompt_logprobs and not entry.prompt_logprobs
    accepted = asked.accept("w0", 0, reported(TokenSpan(0, 0, (3,), (-1.0,), prompt_logprobs=OF_PROMPT)), 11.0)
    record = accepted.record()
    assert record is not None and record.prompt_logprobs == [[0, OF_PROMPT]] and record.first_tokens.tolist() == [3]
    assert entry.prompt_logprobs == OF_PROMPT and not entry.owes_prompt and not entry.spec().prompt_logprobs
    ended = asked.accept("w0", 0, reported(TokenSpan(0, 1, (4,), (-1.0,), "stop")), 12.0)
    assert ended.record() is not None and entry.prompt_logprobs == OF_PROMPT, "kept for a call that comes again"
    asked.give(order(entry, (9,), 4, "agent"), 13.0)
    assert not entry.prompt_logprobs and not entry.owes_prompt


@pytest.mark.parametrize(
    ("span", "field"),
    [
        (TokenSpan(0, 0, (3,), (-1.0,)), "prompt_logprobs bytes"),
        (TokenSpan(0, 0, (3,), (-1.0,), prompt_logprobs=OF_PROMPT[:4]), "prompt_logprobs bytes"),
        (TokenSpan(0, 0, (), (), prompt_logprobs=OF_PROMPT), "prompt_logprobs bytes"),
    ],
)
def test_a_worker_that_leaves_prompt_logprobs_out_is_refused(
    asked: ResponseBuffer, span: TokenSpan, field: str
) -> None:
    with refused(ReportError, field=field):
        asked.accept("w0", 0, reported(span), 11.0)
    assert asked["g0.0"].owes_prompt and len(asked["g0.0"]) == 0


def test_prompt_logprobs_that_nobody_asked_for_are_refused(buffer: ResponseBuffer) -> None:
    with refused(ReportError, field="prompt_logprobs"):
        buffer.accept("w0", 0, reported(TokenSpan(0, 0, (3,), (-1.0,), prompt_logprobs=OF_PROMPT)), 11.0)
    assert len(buffer["g0.0"]) == 0


def test_a_worker_without_them_does_not_continue_what_the_service_has_lost(asked: ResponseBuffer) -> None:
    """A request that moved after its first token, which is not in the log: its worker has the token alone."""
    entry = asked["g0.0"]
    digest = input_digest(beginning_digest(PROMPT), entry.turn_sampling(), (), ())
    assert entry.continues(0, digest), "it has yet to compute them"
    assert entry.continues(2, digest, has_prompt_logprobs=True) and not entry.continues(2, digest)
    asked.accept("w0", 0, reported(TokenSpan(0, 0, (3,), (-1.0,), prompt_logprobs=OF_PROMPT)), 11.0)
    assert entry.continues(2, digest)
