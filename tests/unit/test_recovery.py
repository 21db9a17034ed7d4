"""A service that starts again, or ends, while something cannot be written."""

import asyncio
import errno
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from dora.config import Config, validated
from dora.core import events as on
from dora.data.run_record import CANCELLED_FILE, CancelledGroup, Recorder
from dora.data.types import Prompt
from dora.journal import records
from dora.journal.log import DEFAULT_SIZES
from dora.journal.versions import PersistedVersions
from dora.kvtransfer.peer import this_host
from dora.orchestrator.assembly import services_of
from dora.orchestrator.recording.storage import PERSISTED, RECORD, STATE, Storage
from dora.orchestrator.recovery.state_folder import state_folder_of
from dora.orchestrator.rollout.feed import PromptFeed
from dora.orchestrator.rollout.journal import Journal
from dora.orchestrator.rollout.record_queue import RecordQueue
from dora.orchestrator.runtime import Runtime
from dora.orchestrator.starting import journal_of
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from dora.rpc.roles import CALLER, SESSION, Caller, Role, ServiceTokens
from dora.weights.store import WeightStore
from dora.worker.fake.engine import FakeEngine
from tests.abuse.full import files_up_to
from tests.unit.journal.incarnations import opened
from tests.unit.test_runtime import Praise, Shell

FULL = OSError(errno.ENOSPC, "No space left on device")


def configured(state: Path) -> Config:
    return validated(
        {
            "prompts": "none",
            "rollout": {"group_size": 1, "max_tokens": 64},
            "workers": {"max_model_len_tokens": 256, "reattach_timeout_s": 0.01},
            "service": {"state": str(state), "tick_s": 0.01},
        }
    )


def begun(config: Config) -> list[records.LogRecord]:
    """A service with a trainer of epoch 7 whose steps take 4 groups; one is leased, one is generated."""
    first, second = (
        records.Admitted(
            number, f"g{number}", records.prompt_values(Prompt(f"p{number}", "task", (1, 2), "t", 1)),
            0, 1, 2, 1.0, [number], -1, number + 1,
        )
        for number in (0, 1)
    )  # fmt: skip
    ended = np.array([1], np.uint8)
    tokens = records.Tokens(
        2.0, np.array([0]), np.array([0]), np.array([2]), ended, np.array([1, 2]), np.zeros(2), [[0, "w0", 0, "new"]]
    )
    tree = config.model_dump_json(exclude={"service": {"token"}})
    return [
        records.Begun(0, 1.0, 1.0, tree),
        records.WindowStands(2, 0, -1),
        records.Attached(7, 4),
        first,
        second,
        tokens,
        records.Verdict(0, 2.0, 1.0, True, "", {}),
        records.Leased(0, 0),
    ]


async def test_storage_at_fault_from_the_start_is_told_to_the_core_once_it_is_restored(
    tmp_path: Path, tiny_dense: Path
) -> None:
    """A fresh core stands at no window and no trainer, and that is not to be what the log ends with."""
    config, storage = configured(tmp_path / "state"), Storage()
    with state_folder_of(config, DEFAULT_SIZES) as state:
        assert state is not None
        journal = journal_of(config, state, Storage())
        for record in begun(config):
            journal.note(record)
        await journal.close()
    storage.failed(RECORD, FULL)
    with state_folder_of(config, DEFAULT_SIZES) as state:
        assert state is not None
        journal = journal_of(config, state, storage)
        runtime = Runtime(
            config,
            feed=PromptFeed(config, None, journal=journal),
            verifier=Praise(),
            store=WeightStore(tmp_path / "weights", tiny_dense),
            snapshots=tmp_path,
            recorder=None,
            journal=journal,
            versions=state.versions,
            storage=storage,
        )
        restored = runtime.resume(state.found, {"w0"})
        await asyncio.sleep(0)  # what was to be told soon would have been
        assert runtime.core.machine.state.trainer_epoch == 0 and not runtime.core.machine.state.window.closed
        await runtime.restore(restored)
        assert runtime.core.machine.state.trainer_epoch == 7 and runtime.core.machine.state.window.groups_per_step == 4
        assert runtime.core.machine.state.window.closed, "nothing is admitted"
        await runtime.close()
        await journal.close()
    with state_folder_of(config, DEFAULT_SIZES) as state:
        assert state is not None
        stood = state.found.durable
        assert (stood.trainer_epoch, stood.groups_per_step) == (7, 4)


@pytest.fixture
async def shell(tmp_path: Path, tiny_dense: Path) -> AsyncIterator[Shell]:
    made = Shell(tmp_path, tiny_dense, None)
    yield made
    await made.runtime.close()


async def test_a_life_whose_first_write_fails_begins_once_it_can_be_repeated(shell: Shell, tmp_path: Path) -> None:
    faults: list[OSError | None] = []
    _, log = opened(tmp_path / "state", faults=faults)
    runtime = shell.runtime
    runtime.journal = Journal(log)
    often = runtime.config.service.model_copy(update={"tick_s": 0.01})
    runtime.config = runtime.config.model_copy(update={"service": often})
    with files_up_to(0):
        runtime.journal.note(records.Begun(0, 1.0, 2.0, "{}"))
        beginning = asyncio.create_task(runtime.restore(None))
        await shell.until(lambda: bool(faults))
        assert not beginning.done()
    async with asyncio.timeout(20):
        await beginning
    assert log.durable == log.appended == 1
    await log.close()


async def test_the_end_of_a_service_does_not_wait_for_a_log_that_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Facts that a restart may repeat in another way are not recorded; those in the log are."""
    faults: list[OSError | None] = []
    _, log = opened(tmp_path / "state", faults=faults)
    journal, recorder = Journal(log), Recorder(tmp_path / "record")
    queue = RecordQueue(recorder, Storage(), asyncio.create_task, journal)  # type: ignore[arg-type]

    def cancel(number: int) -> None:
        journal.note(records.Dropped(number, [f"g{number}"], "{}"))
        queue.cancelled(CancelledGroup(f"g{number}", "p0", "sum", 0, "asked for", (1,), (None,), 1.0))

    cancel(0)
    await queue.written()
    with files_up_to(100):
        cancel(1)
        async with asyncio.timeout(20):
            await queue.finish()
    assert "the run record lacks the last 1 writes" in caplog.text and STATE in caplog.text
    assert len((tmp_path / "record" / CANCELLED_FILE).read_text().splitlines()) == 1
    await log.close()
    recorder.close()


async def test_a_service_that_ends_once_there_is_room_again_records_all(tmp_path: Path) -> None:
    faults: list[OSError | None] = []
    _, log = opened(tmp_path / "state", faults=faults)
    journal, recorder = Journal(log), Recorder(tmp_path / "record")
    queue = RecordQueue(recorder, Storage(), asyncio.create_task, journal)  # type: ignore[arg-type]
    with files_up_to(0):
        journal.note(records.Dropped(0, ["g0"], "{}"))
        queue.cancelled(CancelledGroup("g0", "p0", "sum", 0, "asked for", (1,), (None,), 1.0))
        await log.flush()
        assert faults
    async with asyncio.timeout(20):
        await queue.finish()
    assert len((tmp_path / "record" / CANCELLED_FILE).read_text().splitlines()) == 1
    await log.close()
    recorder.close()


async def test_a_worker_that_is_lost_before_it_has_joined_is_not_told_to_the_core(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full as it says hello, for longer than it may be silent."""
    runtime, room = shell.runtime, asyncio.Event()

    async def settled(told: int | None = None) -> None:
        await room.wait()

    monkeypatch.setattr(runtime.journal, "settled", settled)
    service = services_of(runtime, shell.model, tmp_path / "kv", ServiceTokens()).workers
    engine = FakeEngine(slots=8, kv_tokens=4096, max_model_len_tokens=256, model=shell.model)
    hello = convert.hello_to_wire("mine", 1, this_host(), engine.capability)
    hello.fingerprint = shell.session.capability.fingerprint

    async def messages() -> AsyncIterator[pb.WorkerMessage]:
        yield pb.WorkerMessage(hello=hello)
        await asyncio.Event().wait()

    CALLER.set(Caller(Role.WORKER))
    SESSION.set(bytes(32))
    stream = service.Connect(messages(), None)
    first = asyncio.create_task(anext(stream))
    await shell.until(lambda: "mine" in runtime.sessions.workers)
    runtime.sessions.lose(runtime.sessions.workers["mine"], "silent for 60 s")
    room.set()
    await first
    assert [command async for command in stream] == []
    runtime.core.post(on.Tick())
    assert set(runtime.core.machine.state.workers) == {"w0"}, (
        "it would never be lost, and whoever has its name be refused"
    )


async def test_versions_that_could_not_be_kept_are_no_fault_once_they_can_be(shell: Shell, tmp_path: Path) -> None:
    runtime = shell.runtime
    runtime.versions.kept = PersistedVersions(tmp_path / "versions")
    runtime.storage.failed(PERSISTED, FULL, needed_bytes=1 << 60)
    await runtime.look_at_storage()
    assert set(runtime.storage.faults) == {PERSISTED}, "there is no room for so much"
    runtime.storage.faults.clear()
    runtime.storage.failed(PERSISTED, FULL)
    await runtime.look_at_storage()
    assert not runtime.storage.faults
