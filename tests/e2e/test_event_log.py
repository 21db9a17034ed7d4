"""A whole service with fake engines writes its event log; the replay ends where the service's own core did."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import dora
from dora.client import Operator
from dora.errors import NotFound
from dora.orchestrator import starting
from dora.orchestrator.recording.eventlog import EventLog
from dora.orchestrator.recovery.replay import Replay, known_of
from dora.orchestrator.runtime import Runtime
from tests.e2e.test_service_fake import GROUPS, LONG
from tests.owner_token import owner_token
from tests.refusals import refused
from tests.service import configured, during, move_one, running, train, until


@pytest.fixture
def runtimes(monkeypatch: pytest.MonkeyPatch) -> list[Runtime]:
    """The runtime of each service that this test starts: its core is compared once the service has ended."""
    started: list[Runtime] = []

    class Kept(Runtime):
        def __init__(self, *arguments: Any, **fields: Any) -> None:
            super().__init__(*arguments, **fields)
            started.append(self)

    monkeypatch.setattr(starting, "Runtime", Kept)
    return started


async def test_a_replay_ends_as_the_service_did(tiny_dense: Path, tmp_path: Path, runtimes: list[Runtime]) -> None:
    """With handoffs, refusals, and a worker's death."""
    folder = tmp_path / "state"
    kept = {"service__state": str(folder), "service__keep_events": True}
    config = configured(tiny_dense, window__size=2, service__token=owner_token("correct-horse"), **kept, **LONG)
    async with (
        running(config, processes=True) as handle,
        Operator(handle.address, handle.token) as operator,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        enough = asyncio.Event()
        training = asyncio.create_task(train(handle, trainer, steps=4, groups=GROUPS, enough=enough))
        with refused(NotFound, field="worker_id", value="nobody"):
            await operator.drain("nobody")
        await during(training, move_one(operator))
        taken = until(operator, lambda status: status.counters["groups_trained"] >= 2 * GROUPS)
        status = await during(training, taken)
        os.kill(next(worker.pid for worker in status.workers if worker.worker_id == "w0"), signal.SIGKILL)
        await during(training, until(operator, lambda status: status.counters["workers_lost"] >= 1))
        enough.set()
        await training
    (runtime,) = runtimes
    log = EventLog(folder)
    segments = b"".join(path.read_bytes() for path in (folder / "log").iterdir())
    assert log.config.service.token == "" and b"correct-horse" not in segments
    assert log.config.window == config.window and log.config.workers == config.workers

    run = Replay(log.config, log)
    decisions = list(run)
    assert log.torn_bytes == 0
    assert run.machine.counters == runtime.core.machine.counters
    assert known_of(run.machine.state) == known_of(runtime.core.machine.state)
    assert run.machine.state.commands_sent == runtime.core.machine.state.commands_sent
    summary = run.summary()
    assert summary.newest == 4 and summary.counters["groups_trained"] == 4 * GROUPS
    assert summary.counters["workers_lost"] >= 1 and summary.counters["migrations_kv"] > 0
    turned_down = [each for each in decisions if each.refusal]
    assert any(type(each.event).__name__ == "DrainRequested" and "nobody" in each.refusal for each in turned_down)

    again = Replay(log.config, log)
    assert list(again) == decisions
