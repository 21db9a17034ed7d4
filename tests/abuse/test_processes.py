"""A worker that dies again and again is left out; the service goes on with the others."""

import asyncio
from pathlib import Path

import pytest

from dora.config import WorkersConfig
from dora.host import processes as launching
from dora.host.launcher import WorkerStartError
from dora.host.processes import DEATHS_WITHIN_S, Processes, _Worker
from tests.refusals import refused

DIES = ["-c", "raise SystemExit('no memory')"]
LIVES = ["-c", "import signal; signal.pause()"]


def launcher_of(commands: dict[str, list[str]], folder: Path, restarts: int) -> Processes:
    return Processes(WorkersConfig(restarts=restarts), commands.__getitem__, lambda _: {}, folder / "logs")


async def test_the_others_go_on_without_a_worker_that_dies_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launching, "RESTART_PAUSE_S", 0.0)
    launcher = launcher_of({"w0": DIES, "w1": LIVES}, tmp_path, restarts=2)
    launcher.scale(2)
    await asyncio.wait_for(launcher._tasks["w0"], 60)
    assert not launcher.failed.done()
    assert "w0 is not started again: it ended 3 times" in caplog.text and "no memory" in caplog.text
    await launcher.close()


def logged(folder: Path) -> str:
    """All that processes wrote to their logs."""
    return "".join(log.read_text() for log in folder.rglob("*.log"))


async def test_the_service_ends_when_no_worker_is_left(tmp_path: Path) -> None:
    launcher = launcher_of({"w0": DIES, "w1": DIES}, tmp_path, restarts=0)
    launcher.scale(2)
    with refused(WorkerStartError, field="worker_id", names=(1, "no memory")):
        await asyncio.wait_for(launcher.failed, 60)
    await launcher.close()


async def test_a_process_that_waits_is_told_what_it_is_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "WORKER_MODULE", "fileinput")  # prints every line of stdin, then ends
    monkeypatch.setattr(launching, "WAIT_OPTION", "-")
    launcher = launcher_of({"w0": ["-c", "told"]}, tmp_path, restarts=0)
    await launcher.begin(1)
    launcher.scale(1)
    with refused(WorkerStartError, field="worker_id", value="w0"):
        await asyncio.wait_for(launcher.failed, 60)
    assert '["-c", "told"]' in logged(tmp_path)
    await launcher.close()


async def test_a_process_that_waits_ends_with_the_service(tmp_path: Path) -> None:
    launcher = launcher_of({"w0": LIVES, "w1": LIVES}, tmp_path, restarts=0)
    await launcher.begin(2)
    await asyncio.wait_for(launcher.close(), 60)
    assert [worker.process.returncode for worker in launcher._begun if worker.process] == [-15, -15]
    await launcher.close()  # as a service does that ends as it should


def test_deaths_count_for_a_while_and_not_for_a_whole_life() -> None:
    worker = _Worker("w0")
    assert [worker.dies(at_s) for at_s in (0.0, 1.0, DEATHS_WITHIN_S)] == [1, 2, 3]
    assert worker.dies(DEATHS_WITHIN_S + 0.5) == 3, "the first was ten minutes ago"
    assert worker.dies(3 * DEATHS_WITHIN_S) == 1
