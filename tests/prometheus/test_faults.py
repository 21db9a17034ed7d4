"""Faults of a real service under a real Prometheus: each fires its alert and no other, and the alert clears."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final

import pytest

import dora
from dora.client import Operator
from dora.client.sessions import Session
from dora.orchestrator.main import ServiceHandle
from dora.orchestrator.setup import WEIGHTS_FOLDER
from dora.rpc.roles import Role
from dora.tls.authority import make_cluster
from tests.abuse.full import Served
from tests.e2e.agents import ended, joining
from tests.prometheus.hasty import hasty_rules
from tests.prometheus.server import free_address, scraping
from tests.service import beside, configured, running, until
from tests.tls_files import cluster, tls

AT_ONCE: Final = ("DoraTrainerAbsent", "DoraNoEnvironment", "DoraStorageFault", "DoraDown")
GROUPS: Final = 2


async def end_at_once(session: Session) -> None:
    await session.end(reward=1.0)


def training(handle: ServiceHandle | Served, goes_on: asyncio.Event | None = None) -> AbstractAsyncContextManager[None]:
    """A trainer that takes steps, and commits them while ``goes_on`` is set."""

    async def train() -> None:
        async with dora.Trainer(handle.address, token=handle.token) as trainer:
            async for step in trainer.steps(groups=GROUPS):
                async for _group in step:
                    pass
                if goes_on is not None:
                    await goes_on.wait()
                await step.commit(weights=handle.model, wait=True)

    return beside(train())


def driving(
    handle: ServiceHandle, driver: Callable[[Session], Awaitable[None]] = end_at_once
) -> AbstractAsyncContextManager[None]:
    """A driver of the environment ``tool``."""

    async def drive() -> None:
        async with dora.Sessions(handle.address, handle.token) as sessions:
            await sessions.drive("tool", driver)

    return beside(drive())


@pytest.mark.full
async def test_each_fault_fires_its_alert_and_no_other_and_it_clears(
    tiny_dense: Path, tmp_path: Path, binary: Callable[[str], Path]
) -> None:
    address = free_address()
    settings = {
        "prompts": "none",
        "reward__function": "dora.rewards.tiny:score",
        "workers__engine": "fake",
        "workers__orphan_timeout_s": 0.5,
        "window__size": 2,
        "service__metrics": address,
        "service__state": str(tmp_path / "state"),
    }
    rules = hasty_rules(tmp_path / "rules", AT_ONCE)
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


@pytest.mark.full
async def test_faults_of_a_worker_a_trainer_an_environment_and_a_host_fire_their_alerts(
    tiny_dense: Path, tmp_path: Path, binary: Callable[[str], Path]
) -> None:
    """The run goes on meanwhile: each fault fires its alert and no other, and the alert clears."""
    config = configured(
        tiny_dense,
        workers__engine="fake",
        workers__count=2,
        workers__orphan_timeout_s=0.5,
        workers__restarts=0,
        window__size=2,
        service__metrics="127.0.0.1:0",
        service__trainer_stall_timeout_s=1.0,
        reward__function="dora.rewards.tiny:score",
    )
    rules = hasty_rules(tmp_path / "rules", ("DoraWorkersLost", "DoraSandboxStuck", "DoraHostLost"))
    goes_on, released = asyncio.Event(), asyncio.Event()
    goes_on.set()

    async def hang(session: Session) -> None:
        await released.wait()
        await session.end(reward=1.0)

    async with (
        running(config, processes=True) as handle,
        scraping(binary("prometheus"), handle.metrics, tmp_path, rules) as prometheus,
        Operator(handle.address, handle.token) as operator,
        training(handle, goes_on),
    ):
        await until(operator, lambda status: status.counters["groups_trained"] >= 4 * GROUPS)
        await prometheus.firing(set())
        (worker, *_) = (await operator.status()).workers
        os.kill(worker.pid, signal.SIGKILL)
        await prometheus.firing({"DoraWorkersLost"})
        await operator.scale(2)
        await prometheus.firing(set())
        goes_on.clear()
        await prometheus.firing({"DoraTrainerStalled"})
        goes_on.set()
        await prometheus.firing(set())
        async with dora.Prompts(handle.address, handle.token) as prompts, driving(handle, hang):
            await prompts.submit([{"text": "ab", "prompt_id": "p", "group_size": 2, "environment": "tool"}])
            await prometheus.firing({"DoraSandboxStuck"})
            released.set()
            await prometheus.firing(set())
        for _ in range(2):  # the second one comes back in the place of the first
            h1 = await joining(handle.address, handle.token, "h1", tmp_path / "h1.log", "--workers", "0")
            await until(operator, lambda status: ("h1", "ready") in {(each.name, each.state) for each in status.hosts})
            await prometheus.firing(set())
            await ended(h1)
            await prometheus.firing({"DoraHostLost"})


@pytest.mark.full
async def test_a_trainer_that_waits_for_groups_fires_its_alert_which_clears_once_it_has_them(
    tiny_dense: Path, tmp_path: Path, binary: Callable[[str], Path]
) -> None:
    config = configured(
        tiny_dense,
        prompts="none",
        reward__function="dora.rewards.tiny:score",
        workers__engine="fake",
        workers__count=1,
        service__metrics="127.0.0.1:0",
    )
    rules = hasty_rules(tmp_path / "rules", ("DoraTrainerWaits",))
    async with (
        running(config) as handle,
        scraping(binary("prometheus"), handle.metrics, tmp_path, rules) as prometheus,
        training(handle, asyncio.Event()),
        dora.Prompts(handle.address, handle.token) as prompts,
    ):
        await prometheus.firing({"DoraTrainerWaits"})
        await prompts.submit([{"text": "ab", "prompt_id": f"p{n}", "group_size": 2} for n in range(GROUPS)])
        await prometheus.firing(set())
        assert await prometheus.ever_fired() == {"DoraTrainerWaits"}


@pytest.mark.full
async def test_a_front_that_is_killed_fires_its_alert_alone_and_one_that_is_stopped_fires_none(
    tiny_dense: Path, tmp_path: Path, binary: Callable[[str], Path]
) -> None:
    config = configured(tiny_dense, workers__engine="fake", workers__count=0, service__metrics="127.0.0.1:0")
    rules = hasty_rules(tmp_path / "rules", ("DoraDown", "DoraFrontDown"))
    address, up = free_address(), 'up{role="front"} == 1'
    argv = ["-m", "dora", "front", "--http", address, "--model", str(tiny_dense)]

    async with running(config) as handle, scraping(binary("prometheus"), handle.metrics, tmp_path, rules) as prometheus:
        environment = {**os.environ, "DORA_TOKEN": handle.token}
        for number in (signal.SIGKILL, signal.SIGTERM):
            process = await asyncio.create_subprocess_exec(
                sys.executable, *argv, "--service", handle.address, env=environment
            )
            try:
                await prometheus.until(lambda found: bool(found), up)
                await prometheus.firing(set())
            finally:
                process.send_signal(number)
                await process.wait()
            if number == signal.SIGKILL:
                await prometheus.firing({"DoraFrontDown"})
        await prometheus.until(lambda found: not found, 'up{role="front"}')
        assert await prometheus.ever_fired() == {"DoraFrontDown"}


@pytest.mark.full
async def test_prometheus_scrapes_a_service_under_mutual_tls_whose_certificates_are_replaced(
    tiny_dense: Path, tmp_path: Path, binary: Callable[[str], Path]
) -> None:
    folder = cluster(tmp_path / "tls")
    guarded = {"workers__engine": "fake", "workers__count": 0, "tls__folder": str(folder / "service")}
    config = configured(tiny_dense, **guarded, service__metrics="127.0.0.1:0")
    own = tls(folder, "metrics")
    async with running(config) as handle, scraping(binary("prometheus"), handle.metrics, tmp_path, tls=own) as found:
        while {each["value"][1] for each in await found.query("up")} != {"1"}:
            pass
        make_cluster(folder, ["127.0.0.1"], list(Role), days=30, authority_days=365, new_authority=True)
        scrapes = 'min(count_over_time(up{job="dora"}[1h]))'
        before = float((await found.query(scrapes))[0]["value"][1])
        while float((await found.query(scrapes))[0]["value"][1]) < before + 4:
            pass
        assert (await found.query("min_over_time(up[1h])"))[0]["value"][1] == "1"
