"""Decides which spans are sent: a share of the sessions with all that belongs to them, and every step."""

from collections.abc import Sequence
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, Sampler, SamplingResult, TraceIdRatioBased

from dora.orchestrator.tracing.spans import SESSION


class _Roots(Sampler):
    def __init__(self, fraction: float) -> None:
        self._sessions = TraceIdRatioBased(fraction)

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: Any = None,
        attributes: Any = None,
        links: Sequence[Any] | None = None,
        trace_state: Any = None,
    ) -> SamplingResult:
        sampler = self._sessions if name == SESSION else ALWAYS_ON
        return sampler.should_sample(parent_context, trace_id, name, kind, attributes, links)

    def get_description(self) -> str:
        return f"every step, and sessions by {self._sessions.get_description()}"


def sampler_of(fraction: float) -> Sampler:
    return ParentBased(_Roots(fraction))
