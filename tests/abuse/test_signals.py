"""Each signal has the meaning that docs/operations.md gives it, for a service, a host, a worker and a pool."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import dora
from dora.client import Operator
from dora.system.signals import CHILD_IGNORED, CHILD_STOP, DRAIN, IGNORED, INTERRUPTED
from tests.service import until
from tests.sweeps import some_of

pytestmark = pytest.mark.xdist_group("signals")
ENDS_S = 40.0
SETTINGS = (
    *("model=tiny", "prompts=tiny", "workers.engine=fake", "workers.count=1", "workers.max_model_len_tokens=512"),
    *("workers.kv_tokens=4096", "kv.pool_mb=0", "service.listen=127.0.0.1:0", "service.drain_timeout_s=60"),
)


@pytest.fixture(autouse=True)
def hangups_count() -> Iterator[None]:
    """Children inherit an ignored signal, as under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@asynccontextmanager
async def served(folder: Path, *more: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, Any]]]:
    """A service as a user starts it, and what it prints in JSON once it is ready. Its words go to ``said``."""
    options = [part for each in (*SETTINGS, *more) for part in ("--set", each)]
    with (folder / "said").open("ab") as said:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "dora", "serve", "--json", *options),
            stdout=asyncio.subprocess.PIPE,
            stderr=said,
            start_new_session=True,
        )
    assert process.stdout is not None
    try:
        text = b""
        while not text.endswith(b"}\n"):
            line = await asyncio.wait_for(process.stdout.readline(), ENDS_S)
            assert line, said(folder)
            text += line
        yield process, json.loads(text)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def attached(ready: dict[str, Any]) -> AsyncIterator[None]:
    """A trainer that takes a step's groups and does not commit, so that a drain lasts."""
    async with dora.Trainer(ready["address"], token=ready["token"]) as trainer:
        steps = trainer.steps(groups=2)
        step = await anext(steps)
        async for _ in step:
            pass
        yield


def said(folder: Path) -> str:
    return (folder / "said").read_text()


def is_gone(folder: str) -> bool:
    return not Path(folder).exists()


def ignores(process: psutil.Process, numbers: tuple[signal.Signals, ...]) -> bool:
    """Returns whether the process ignores all of these. Source: proc(5), SigIgn."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    mask = next(int(line.split()[1], 16) for line in lines if line.startswith("SigIgn:"))
    return all(mask >> (number - 1) & 1 for number in numbers)


def runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("number", some_of(DRAIN, signal.SIGHUP), ids=lambda number: number.name)
async def test_each_of_these_drains_a_service(number: signal.Signals, tmp_path: Path) -> None:
    async with served(tmp_path) as (process, ready):
        process.send_signal(number)
        assert await asyncio.wait_for(process.wait(), ENDS_S) == 0
    assert "draining" in said(tmp_path) and is_gone(ready["run_folder"])


@pytest.mark.parametrize("number", some_of([*DRAIN, *IGNORED], signal.SIGUSR1), ids=lambda number: number.name)
async def test_while_it_drains_an_interrupt_ends_it_and_no_other_signal_does(
    number: signal.Signals, tmp_path: Path
) -> None:
    async with served(tmp_path) as (process, ready):
        children = psutil.Process(process.pid).children(recursive=True)
        for each in IGNORED:
            process.send_signal(each)
        async with attached(ready), Operator(ready["address"], ready["token"]) as operator:
            process.send_signal(signal.SIGTERM)
            await until(operator, lambda status: status.draining)
            process.send_signal(number)
            if number != signal.SIGINT:
                await operator.status()  # answered after the signal was
                process.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(process.wait(), ENDS_S) == INTERRUPTED, said(tmp_path)
    told = said(tmp_path)
    assert "interrupted" in told and "Traceback" not in told and is_gone(ready["run_folder"])
    assert children and not [each for each in children if each.is_running()]


async def test_a_terminals_signals_reach_the_service_alone_and_its_workers_ignore_a_schedulers_notice(
    tmp_path: Path,
) -> None:
    async with served(tmp_path, "kv.pool_mb=64") as (process, ready):
        children = psutil.Process(process.pid).children()
        modules = {"dora.worker", "dora.pool"}
        members = [child for child in children if modules & set(child.cmdline())]
        assert len(members) == 2 and all(os.getpgid(child.pid) != process.pid for child in members)
        async with attached(ready):
            async with Operator(ready["address"], ready["token"]) as operator:
                await until(operator, lambda _: all(ignores(child, CHILD_IGNORED) for child in members))
            for child in members:
                for number in CHILD_IGNORED:
                    child.send_signal(number)
            assert all(runs(child) for child in members)
            assert [child.pid for child in psutil.Process(process.pid).children()] == [each.pid for each in children]
            for number, child in zip(CHILD_STOP, members, strict=True):
                child.send_signal(number)
            async with Operator(ready["address"], ready["token"]) as operator:
                await until(operator, lambda _: not any(runs(child) for child in members))
        os.killpg(process.pid, signal.SIGHUP)
        assert await asyncio.wait_for(process.wait(), ENDS_S) == 0


@pytest.mark.parametrize("number", some_of(DRAIN, signal.SIGTERM), ids=lambda number: number.name)
async def test_each_of_these_drains_a_host(number: signal.Signals, tmp_path: Path) -> None:
    async with served(tmp_path) as (_, ready):
        argv = ("-m", "dora", "host", "--join", ready["address"], "--name", "b", "--workers", "1")
        with (tmp_path / "host").open("ab") as words:
            host = await asyncio.create_subprocess_exec(
                sys.executable,
                *argv,
                env={**os.environ, "DORA_TOKEN": ready["token"]},
                stdout=words,
                stderr=words,
                start_new_session=True,
            )
        try:
            async with Operator(ready["address"], ready["token"]) as operator:
                await until(operator, lambda status: len(status.workers) == 2)
            for each in IGNORED:
                host.send_signal(each)
            host.send_signal(number)
            assert await asyncio.wait_for(host.wait(), ENDS_S) == 0, (tmp_path / "host").read_text()
            assert "has left" in (tmp_path / "host").read_text()
        finally:
            if host.returncode is None:
                host.kill()
            await host.wait()


def test_the_documented_table_is_the_one_in_force() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| SIG")]
    named: dict[str, tuple[str, str]] = {
        name: (row[2].split()[0].strip(";,"), row[3].split()[0])
        for row in rows
        for name in re.findall(r"SIG[A-Z0-9]+", row[1])
    }
    service, child = ({each.name for each in group} for group in (DRAIN, CHILD_STOP))
    assert {name for name, (does, _) in named.items() if does == "drains"} == service
    assert {name for name, (_, does) in named.items() if does == "leaves"} == child
    assert {name for name, (does, _) in named.items() if does == "ignored"} == {each.name for each in IGNORED}
    assert {name for name, (_, does) in named.items() if does == "ignored"} == {each.name for each in CHILD_IGNORED}


@pytest.mark.parametrize("number", some_of(DRAIN, signal.SIGHUP), ids=lambda number: number.name)
async def test_each_of_these_ends_a_demo_like_ctrl_c(number: signal.Signals, tmp_path: Path) -> None:
    argv = ("-m", "dora", "demo", "--model", "tiny", "--steps", "200", "--out", str(tmp_path / "out"))
    demo = await asyncio.create_subprocess_exec(
        *(sys.executable, *argv),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    assert demo.stdout is not None
    try:
        while b"starting" not in await asyncio.wait_for(demo.stdout.readline(), ENDS_S):
            assert demo.returncode is None
        children = psutil.Process(demo.pid).children(recursive=True)
        for each in IGNORED:
            demo.send_signal(each)
        demo.send_signal(number)
        told, _ = await asyncio.wait_for(demo.communicate(), ENDS_S)
        assert demo.returncode == INTERRUPTED and b"Traceback" not in told, told.decode()
    finally:
        if demo.returncode is None:
            demo.kill()
        await demo.wait()
    assert children and not [each for each in children if runs(each)]
