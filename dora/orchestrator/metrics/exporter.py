"""The pages for Prometheus, each a text that is made on request.

A page is read in the event loop, where nothing changes meanwhile, and written in a thread of its own.
"""

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from prometheus_client import ProcessCollector

from dora.metrics.declaration import families
from dora.metrics.text import text_of
from dora.orchestrator.metrics.of_hosts import HOST, HostReadings, histograms_text
from dora.orchestrator.metrics.of_service import SERVICE
from dora.orchestrator.metrics.readings import ServiceReadings, free_bytes, storage_folders
from dora.orchestrator.runtime import Runtime

SERVICE_PATH: Final = "/metrics"
HOST_PATH: Final = "/hosts/{name}/metrics"


class Exporter:
    """Makes the pages of one service. ``model`` labels its engines' metrics."""

    def __init__(self, runtime: Runtime, run_folder: Path, model: str) -> None:
        self._runtime = runtime
        self._model = model
        self._folders = storage_folders(runtime.config, run_folder)
        self._process = ProcessCollector(registry=None)
        self._thread = ThreadPoolExecutor(1, "metrics")  # a file system that hangs stops no other thread

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def live(self) -> str:
        return self._runtime.live()

    def ready(self) -> str:
        return self._runtime.ready()

    async def service(self) -> bytes:
        loop = asyncio.get_running_loop()
        free = await loop.run_in_executor(self._thread, free_bytes, self._folders)
        found = [*families(SERVICE, ServiceReadings(self._runtime, free))]
        return await loop.run_in_executor(
            self._thread, text_of, found, (self._runtime.telemetry.registry, self._process)
        )

    async def host(self, name: str) -> bytes | None:
        """Returns the metrics of a connected host, or None if none has this name."""
        status = self._runtime.hosts.status(name)
        if status is None:
            return None
        readings = HostReadings(self._runtime, status, self._model)
        found, histograms = [*families(HOST, readings)], readings.histograms()

        def text() -> bytes:
            return text_of(found, ()) + histograms_text(histograms)

        return await asyncio.get_running_loop().run_in_executor(self._thread, text)

    def targets(self, address: str, scheme: str = "http") -> list[Mapping[str, Any]]:
        """Returns the pages as Prometheus discovers them over HTTP, those of fronts included. It has reached this
        service at ``address``. The label ``role`` is service, host or front.
        """
        pages = [(SERVICE_PATH, address, "service")]
        pages += [(HOST_PATH.format(name=name), name, "host") for name in self._runtime.hosts.connected()]
        found = [_target(address, scheme, *page) for page in pages]
        for front in self._runtime.fronts:
            reached = front.reached_from(address.rpartition(":")[0] or address)
            if reached is not None:
                found.append(_target(reached, "https" if front.secure else "http", SERVICE_PATH, reached, "front"))
        return found


def _target(address: str, scheme: str, path: str, instance: str, role: str) -> Mapping[str, Any]:
    labels = {"__scheme__": scheme, "__metrics_path__": path, "instance": instance, "role": role}
    return {"targets": [address], "labels": labels}
