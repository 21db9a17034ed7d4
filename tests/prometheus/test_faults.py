"""Faults of a real service under a real Prometheus: each fires its alert and no other, and the alert clears."""

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest

import dora
from dora.client.sessions import Session
from dora.orchestrator.main import ServiceHandle
from dora.orchestrator.setup import WEIGHTS_FOLDER
from tests.prometheus.server import DEPLOYED, scraping
from tests.service import configured, running

AT_ONCE: Final = ("DoraTrainerAbsent", "DoraNoEnvironment", "DoraStorageFault", "DoraDown")
GROUPS: Final = 2


def hasty_rules(folder: Path) -> Path:
    """The rules, in a folder of their own; alerts of ``AT_ONCE`` fire after a second of their fault."""
    folder.mkdir()
    text = (DEPLOYED / "alerts.yml").read_text()
    for name in AT_ONCE:
        text, changed = re.subn(rf"(- alert: {name}\n *expr: [^\n]*\n *for: )\w+", r"\g<1>1s", text)
        assert changed == 1, name
    (folder / "alerts.yml").write_text(text)
    (folder / "recording.yml").write_bytes((DEPLOYED / "recording.yml").read_bytes())
    return folder


@asynccontextmanager
async def training(handle: ServiceHandle) -> AsyncIterator[None]:
    """A trainer that takes and commits steps."""

    async def train() -> None:
        async with dora.Trainer(handle.address, token=handle.token) as trainer:
            async for step in trainer.steps(groups=GROUPS):
                async for _group in step:
                    pass
                await step.commit(weights=handle.model, wait=True)

    task = asyncio.create_task(train())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def end_at_once(session: Session) -> None:
    await session.end(reward=1.0)


@asynccontextmanager
async def driving(handle: ServiceHandle) -> AsyncIterator[None]:
    """A driver of the environment ``tool``."""

    async def drive() -> None:
        async with dora.Sessions(handle.address, handle.token) as sessions:
            await sessions.drive("tool", end_at_once)

    task = asyncio.create_task(drive())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.full
async def test_each_fault_fires_its_alert_and_no_other_and_it_clears(
    tiny_dense: Path, tmp_path: Path, binary: Callable[[str], Path]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    settings = {
        "prompts": "none",
        "reward__function": "dora.rewards.tiny:score",
        "workers__engine": "fake",
        "workers__orphan_timeout_s": 0.5,
        "window__size": 2,
        "service__metrics": address,
        "service__state": str(tmp_path / "state"),
    }
    rules = hasty_rules(tmp_path / "rules")
    async with scraping(binary("prometheus"), address, tmp_path, rules) as prometheus:
        async with running(configured(tiny_dense, workers__count=2, **settings)) as handle:
            await prometheus.firing({"DoraTrainerAbsent"})
            async with training(handle), dora.Prompts(handle.address, handle.token) as prompts:
                await prometheus.firing(set())
                await prompts.submit(
                    [{"text": "ab", "prompt_id": f"p{n}", "group_size": 2, "environment": "tool"} for n in range(2)]
                )
                await prometheus.firing({"DoraNoEnvironment"})
                async with driving(handle):
                    await prometheus.firing(set())
                store = handle.run_folder / WEIGHTS_FOLDER
                store.rename(away := handle.run_folder / "away")
                await prometheus.firing({"DoraStorageFault"})
                away.rename(store)
                await prometheus.firing(set())
        await prometheus.firing({"DoraDown"})
        async with running(configured(tiny_dense, workers__count=0, **settings)) as handle, training(handle):
            await prometheus.firing({"DoraRestarted"})
