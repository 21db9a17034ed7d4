"""Waits of a service: for its workers, for its stop, and for its trainer to drain it."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

from dora.config import Config
from dora.core import events as on
from dora.errors import DoraError
from dora.host.launcher import OwnLauncher, WorkerStartError
from dora.orchestrator.runtime import Runtime
from dora.system.awake import awake_s

log = logging.getLogger("dora.service")

POLL_S = 0.1
LINES_S = 10.0

Failures: TypeAlias = tuple[asyncio.Future[None], ...]


async def until_ready(
    config: Config,
    runtime: Runtime,
    launcher: OwnLauncher,
    stop: asyncio.Event,
    failures: Failures,
    progress: Callable[[str], None],
) -> bool:
    """Returns whether all workers hold version 0; False if the service was stopped before. Raises if they die or time
    out. ``progress`` hears every ``LINES_S`` how many are ready.
    """
    loop = asyncio.get_running_loop()
    began_s = told_s = loop.time()
    ends_s = began_s + config.workers.start_timeout_s
    while not stop.is_set():
        ready = sum(worker.hosts >= 0 for worker in runtime.core.state.workers.values())
        if ready >= config.workers.count:
            return True
        reason = launcher.early_death() or unreproduced(runtime)
        if reason is None and loop.time() > ends_s:
            reason = f"{ready} of {config.workers.count} workers answered in {config.workers.start_timeout_s:g} s"
        if reason is not None:
            raise WorkerStartError(reason)
        if loop.time() >= told_s + LINES_S:
            told_s = loop.time()
            progress(f"{ready} of {config.workers.count} workers are ready after {told_s - began_s:.0f} s")
        await asyncio.wait(failures, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
        _raise_failure(failures)
    return False


def unreproduced(runtime: Runtime) -> str | None:
    """Returns why the first workers refuse version 0, which no worker has loaded, or None if they do not.

    Its weights are the model's own, so no trainer can publish it again.
    """
    state = runtime.core.state
    if state.window.newest:
        return None
    refusals = state.suspects[0].refusals if 0 in state.suspects else {}
    if 0 not in state.rejected and (not refusals or len(refusals) < min(2, len(state.workers))):
        return None
    reasons = {worker_id: refusal.reason for worker_id, refusal in refusals.items()}
    said = "; ".join(f"{worker_id}: {reason}" for worker_id, reason in reasons.items()) or state.rejected[0].reason
    return f"no worker reproduces the model as transformers computes it: {said}"


def failed_alone(launcher: OwnLauncher, runtime: Runtime) -> asyncio.Future[None]:
    """Fails like the launcher does, unless other hosts have workers: the service continues without this host's."""
    alone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def tell(failed: asyncio.Future[None]) -> None:
        if not failed.cancelled() and (error := failed.exception()) is not None:
            if runtime.hosts.has_others():
                log.error("this host has no worker left: %s", error)
            elif not alone.done():
                alone.set_exception(error)

    launcher.failed.add_done_callback(tell)
    return alone


async def opened(opens: Coroutine[Any, Any, None], stop: asyncio.Event, failed: asyncio.Future[None]) -> bool:
    """Opens the service, which waits while storage is at fault. Returns False if the service was stopped before."""
    opening, stopping = asyncio.create_task(opens), asyncio.create_task(stop.wait())
    try:
        ends: list[asyncio.Future[Any]] = [opening, stopping, failed]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        if not opening.done():
            opening.cancel()
            await asyncio.wait([opening])
    _raise_failure((failed,))
    if opening.cancelled():
        return False
    await opening
    return True


async def until_stopped(stop: asyncio.Event, *failures: asyncio.Future[None]) -> None:
    """Waits for the stop; raises the first failure."""
    stopping = asyncio.create_task(stop.wait())
    try:
        ends: list[asyncio.Future[Any]] = [stopping, *failures]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
    _raise_failure(failures)


async def drain(config: Config, runtime: Runtime, failures: Failures) -> None:
    """Stops admission. An attached trainer may take and commit open groups within the time limit, and sees the end."""
    runtime.feed.close()
    runtime.core.post(on.AdmissionEnded())
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + config.service.drain_timeout_s
    runtime.draining.ends_s = awake_s() + config.service.drain_timeout_s
    while runtime.trainers.is_expected() and loop.time() < ends_s:
        await asyncio.wait(failures, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
        _raise_failure(failures)
    left = len(runtime.core.state.group_row)
    log.info("drained; %d groups were not taken by a trainer", left)


def _raise_failure(failures: Failures) -> None:
    for failure in failures:
        if failure.done() and not failure.cancelled() and (error := failure.exception()) is not None:
            if isinstance(error, DoraError):
                raise error
            raise RuntimeError("the service failed; this is a bug") from error
