"""Whole services on a disk that is full for a while, that die, or that stand still."""

import asyncio
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import dora
from dora.client import Operator
from dora.data.run_record import STEPS_FILE, TRAJECTORIES_FILE
from dora.data.trajectory import TrajectoryGroup
from dora.errors import Conflict, InvalidValue
from dora.ops.cli.app import app
from dora.ops.verify.check import read_trajectories
from dora.ops.verify.committed import missing, read_steps
from dora.rpc.errors import LimitExceeded, ServiceUnavailable
from tests.abuse.full import Served, has_namespaces, served, with_own_disk
from tests.private_token import with_token
from tests.refusals import refused
from tests.service import check_promises, during, until

GROUPS = 3
MEGABYTE = 1 << 20

own_disk = pytest.mark.skipif(not has_namespaces(), reason="this kernel gives a user no mounts of its own")


async def train(service: Served, steps: int, taken: list[list[TrajectoryGroup]], reconnect_s: float = 60.0) -> None:
    async with dora.Trainer(service.address, token=service.token, reconnect_s=reconnect_s) as trainer:
        async for step in trainer.steps(groups=GROUPS):
            taken.append([group async for group in step])
            await step.commit(weights=service.model, wait=True)
            if len(taken) == steps:
                return


def at_fault(place: str) -> Any:
    return lambda status: [fault.place for fault in status.storage_faults] == [place]


@own_disk
async def test_a_record_on_a_full_disk_holds_the_step_up_and_nothing_is_lost(tiny_dense: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    taken: list[list[TrajectoryGroup]] = []
    async with served(tiny_dense, disk, 12 * MEGABYTE, record=disk / "record") as service:
        async with Operator(service.address, service.token) as operator:
            record, filler = service.disk / "record", service.fill()
            training = asyncio.create_task(train(service, 3, taken))
            status = await during(training, until(operator, at_fault("record")))
            assert status.storage_faults[0].reason == "No space left on device"
            admitted = status.counters["groups_admitted"]
            shown = await asyncio.to_thread(
                CliRunner().invoke,
                app,
                ["status", "--address", service.address, "--token-file", with_token(service.token)],
            )
            assert "record: No space left on device; no group is admitted" in " ".join(shown.stdout.split())
            status = await operator.status()
            assert status.newest_version == 0 and not (record / STEPS_FILE).read_bytes()
            assert status.counters["groups_admitted"] == admitted, "what was admitted goes on, and nothing else"
            filler.unlink()
            await training
            status = await operator.status()
            assert status.newest_version == 3 and not status.storage_faults
            assert status.counters["storage_faults"] == 1 and status.counters["groups_lost"] == 0
        kept = tmp_path / "kept"
        shutil.copytree(record, kept)
    assert service.process.returncode == 0
    check_promises(taken, window=2, groups=GROUPS)
    steps, lacking = missing(kept, read_trajectories(kept / TRAJECTORIES_FILE))
    assert steps == 3 and not list(lacking)
    for number, groups in enumerate(taken):
        assert set(read_steps(kept / STEPS_FILE)[0][number].groups) == {group.group_id for group in groups}


@pytest.mark.full
@own_disk
async def test_a_service_is_stopped_while_its_record_is_full(tiny_dense: Path, tmp_path: Path) -> None:
    """It ends in good order, within its time to drain, and says what the record lacks; the trainer is told."""
    disk = tmp_path / "disk"
    taken: list[list[TrajectoryGroup]] = []
    settings = {"record": disk / "record", "service.drain_timeout_s": 1}
    async with served(tiny_dense, disk, 12 * MEGABYTE, **settings) as service:
        service.fill()
        training = asyncio.create_task(train(service, 1, taken, reconnect_s=0.5))
        async with Operator(service.address, service.token) as operator:
            await during(training, until(operator, at_fault("record")))
        service.process.terminate()
        assert await service.process.wait() == 0
        with pytest.raises(ServiceUnavailable):
            await training
    assert "the run record lacks the last" in (tmp_path / "service.log").read_text()


@own_disk
async def test_shared_memory_that_is_full_breaks_no_stream_and_a_version_may_be_published_again(
    tiny_dense: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    settings = {"service.run_folder": disk / "run", "workers.count": 2}
    async with (
        served(tiny_dense, disk, 12 * MEGABYTE, **settings) as service,
        Operator(service.address, service.token) as operator,
        dora.Trainer(service.address, token=service.token) as trainer,
    ):
        incoming = service.disk / "run" / "weights" / "incoming"
        async for step in trainer.steps(groups=GROUPS):
            groups = [group async for group in step]
            filler = service.fill()
            await until(operator, at_fault("run folder"))
            for _ in range(2):
                with refused(LimitExceeded, field="weights: model.safetensors", value="1,218,512 bytes"):
                    await step.commit(weights=tiny_dense, wait=True)
                assert not [file for file in incoming.rglob("*") if file.is_file()], "nothing half-written stays"
            filler.unlink()
            commit = await step.commit(weights=tiny_dense, wait=True)
            assert commit.version == step.number + 1 and len(groups) == GROUPS
            status = await until(operator, lambda status: not status.storage_faults)
            if step.number == 1:
                break
        assert status.counters["workers_lost"] == status.counters["groups_lost"] == 0
        assert {worker.state for worker in status.workers} <= {"ready", "loading", "vacating"}
    assert service.process.returncode == 0


@pytest.mark.full
@own_disk
def test_a_pool_on_a_full_disk_drops_what_it_cannot_write_and_keeps_the_rest(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    argv = [sys.executable, "-m", "tests.abuse.spilling", str(disk), str(tmp_path)]
    argv, root = with_own_disk(argv, disk, MEGABYTE), Path(__file__).parents[2]
    ended = subprocess.run(argv, cwd=root, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.full  # four services, one after the other; test_publish has a shorter form
async def test_a_run_folder_is_used_again_however_its_service_ended(tiny_dense: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for end in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, None):
        taken: list[list[TrajectoryGroup]] = []
        async with served(tiny_dense, folder, 0, **{"service.run_folder": folder}) as service:
            await train(service, 3, taken)
            check_promises(taken, window=2, groups=GROUPS)
            if end is not None:
                service.process.send_signal(end)
                await service.process.wait()


def ask(address: str) -> Any:
    return CliRunner().invoke(app, ["status", "--address", address, "--token-file", with_token("secret")])


def test_a_service_that_stands_still_is_told_from_one_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    hasty = type(
        "Hasty", (Operator,), {"__init__": lambda self, *a, **k: Operator.__init__(self, *a, **k, timeout_s=1)}
    )
    monkeypatch.setattr("dora.client.Operator", hasty)
    with socket.create_server(("127.0.0.1", 0)) as still:
        address = f"127.0.0.1:{still.getsockname()[1]}"
        result = ask(address)
        assert result.exit_code == 6 and "accepts connections, but no service answered" in result.stderr
    result = ask(address)
    assert result.exit_code == 3 and "no service answers at" in result.stderr


@pytest.mark.full
async def test_one_trainers_size_bars_no_other(tiny_dense: Path, tmp_path: Path) -> None:
    """A size beyond all bounds is refused; a large one that was never trained with is replaced."""
    async with served(tiny_dense, tmp_path / "none", 0) as service:
        async with dora.Trainer(service.address, token=service.token) as first:
            with refused(InvalidValue, field="groups_per_step", value="1000000", names=("262144",)):
                await first.attach(groups=1_000_000)
            assert (await first.attach(groups=100_000)).groups_per_step == 100_000
        taken: list[list[TrajectoryGroup]] = []
        await train(service, 2, taken)
        check_promises(taken, window=2, groups=GROUPS)
        async with dora.Trainer(service.address, token=service.token) as third:
            with refused(Conflict, field="groups_per_step", value="4"):
                await third.attach(groups=4)
