"""Spans from the core's events and commands."""

from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from dora.core import commands as do
from dora.core import events as on
from dora.orchestrator.tracing.sampling import sampler_of
from dora.orchestrator.tracing.spans import Spans
from tests.unit.test_machine import Bench


class TracedBench(Bench):
    """A bench whose events and commands become spans."""

    def __init__(self, fraction: float = 1.0, **settings: Any) -> None:
        super().__init__(**settings)
        provider, self.exporter = TracerProvider(sampler=sampler_of(fraction)), InMemorySpanExporter()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.spans = Spans(provider.get_tracer("test"), self.state, "tiny")

    def post(self, event: on.Event) -> list[do.Command]:
        commands = super().post(event)
        told = event.in_rows(self.state.request_row) if isinstance(event, on.Progress) else event
        self.spans.came(told, commands)
        return commands

    def ended(self, name: str) -> list[tuple[Any, str]]:
        """The attributes of the spans of this name that have ended, each with the reason of a failure."""
        spans = self.exporter.get_finished_spans()
        return [(dict(span.attributes or {}), span.status.description or "") for span in spans if span.name == name]


def test_a_response_is_a_session_of_one_turn() -> None:
    bench = TracedBench()
    bench.start("w0")
    bench.offer(1)
    bench.complete("g0.0")
    assert bench.ended("session") == [({"gen_ai.conversation.id": "g0.0", "dora.group": "g0", "dora.version": 0}, "")]
    ((turn, reason),) = bench.ended("chat tiny")
    assert turn["dora.worker"] == "w0" and turn["dora.response_tokens"] == 7 and not reason


def test_a_cancelled_group_ends_its_spans_with_the_reason() -> None:
    bench = TracedBench()
    bench.start("w0")
    bench.offer(1, group_size=2)
    bench.post(on.GroupCancelled("g0", "asked for"))
    assert (
        [reason for _, reason in bench.ended("session")]
        == ["asked for"] * 2
        == [reason for _, reason in bench.ended("chat tiny")]
    )


@pytest.mark.parametrize(("outcome", "reason"), [({}, ""), ({"ok": False, "error_kind": "refused"}, "undone")])
def test_a_handoff_is_a_span_with_its_reason(outcome: dict[str, Any], reason: str) -> None:
    bench = TracedBench()
    bench.move()
    bench.answer(bench.given(do.CopyOut)[0], locator="snapshot", tokens=3)
    bench.answer(bench.given(do.CopyIn)[0], **outcome)
    attributes = {"dora.source": "w0", "dora.target": "w1", "dora.reason": "operator"}
    assert bench.ended("move") == [(attributes, reason)]


def test_a_publication_is_part_of_its_step() -> None:
    bench = TracedBench(groups=1)
    bench.start("w0")
    bench.offer(1)
    bench.post(on.StepRequested(1, 0))
    bench.complete("g0.0")
    bench.spans.published(0, 1, took_s=2.0)
    bench.post(on.StepCommitted(1, 0))
    publish, step = (
        next(span for span in bench.exporter.get_finished_spans() if span.name == name) for name in ("publish", "step")
    )
    assert publish.parent is not None and publish.parent.span_id == step.context.span_id
    assert publish.end_time - publish.start_time == 2_000_000_000


def test_no_span_is_kept_of_a_session_that_is_not_sampled() -> None:
    """service.traces_fraction 0: the step alone is traced."""
    bench = TracedBench(fraction=0.0, groups=1)
    bench.start("w0")
    bench.offer(2, group_size=2)
    bench.post(on.StepRequested(1, 0))
    bench.spans.close()
    assert [span.name for span in bench.exporter.get_finished_spans()] == ["step"]
