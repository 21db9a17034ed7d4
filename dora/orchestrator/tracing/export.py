"""Sends spans to a collector over OTLP and HTTP, with the packages of the extra ``traces``.

A thread of the SDK sends them in batches. Its queue is bounded: if the collector is slow or away, spans are dropped.
"""

import asyncio
import importlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from dora.config import ServiceConfig
from dora.data.extras import install
from dora.errors import DoraError
from dora.release import __version__

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

NAME: Final = "dora"
EXPORT_TIMEOUT_S: Final = 5.0
_PATH: Final = "/v1/traces"
_PACKAGES: Final = ("opentelemetry.sdk.trace.sampling", "opentelemetry.exporter.otlp.proto.http.trace_exporter")


def check_traces(service: ServiceConfig) -> None:
    """Raises DoraError if traces are configured and their packages are not installed."""
    if service.traces:
        for package in _PACKAGES:
            try:
                importlib.import_module(package)
            except ImportError as error:
                raise DoraError(f"--traces needs OpenTelemetry. Run {install('traces')}.") from error


@asynccontextmanager
async def tracer_of(service: ServiceConfig) -> AsyncIterator["Tracer"]:
    """Yields the tracer of the configured collector. At the end it sends what is left."""
    check_traces(service)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from dora.orchestrator.tracing.sampling import sampler_of

    resource = Resource({"service.name": NAME, "service.version": __version__})
    sampler = sampler_of(service.traces_fraction)
    provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(service.traces.rstrip("/") + _PATH, timeout=EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    try:
        yield provider.get_tracer(NAME, __version__)
    finally:
        await asyncio.to_thread(provider.shutdown)
