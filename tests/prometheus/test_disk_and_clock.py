"""A disk that is full, a log that cannot be written, and a clock that is off, under a real Prometheus."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dora.client import Operator
from dora.rpc.roles import Role
from tests.abuse.full import has_namespaces, served
from tests.chaos.clock import jump
from tests.e2e.agents import are_ready, ended, joining
from tests.prometheus.hasty import hasty_rules
from tests.prometheus.server import free_address, scraping
from tests.prometheus.test_faults import training
from tests.service import configured, running, until

DISK_BYTES = 64 << 20
HOUR_S = 3600.0


@pytest.mark.full
@pytest.mark.skipif(not has_namespaces(), reason="this user may not mount a file system in a namespace")
@pytest.mark.parametrize(
    ("setting", "alert"), [("record", "DoraStorageFault"), ("service.state", "DoraJournalNotDurable")]
)
async def test_a_full_disk_fires_its_alert_and_no_other_and_it_clears(
    setting: str, alert: str, tiny_dense: Path, tmp_path: Path, binary: Callable[[str], Path]
) -> None:
    """A trainer commits meanwhile, so the record, the log and the kept versions are written again and again."""
    disk, address = tmp_path / "disk", free_address()
    rules = hasty_rules(tmp_path / "rules", ("DoraStorageFault", "DoraJournalNotDurable"))
    settings = {setting: str(disk / "kept"), "service.metrics": address, "record_weights": "none"}
    async with (
        served(tiny_dense, disk, DISK_BYTES, **settings) as service,
        scraping(binary("prometheus"), address, tmp_path, rules) as prometheus,
        Operator(service.address, service.token) as operator,
        training(service),
    ):
        for _ in range(2):
            trained = (await operator.status()).counters["groups_trained"]
            await until(operator, lambda status: status.counters["groups_trained"] > trained)  # noqa: B023
            await prometheus.firing(set())
            filler = service.fill()
            await prometheus.firing({alert})
            await asyncio.to_thread(filler.unlink)
            await prometheus.firing(set())
        assert await prometheus.ever_fired() == {alert}


@pytest.mark.full
async def test_a_clock_that_is_off_fires_its_alert_and_no_other_and_it_clears(
    tiny_dense: Path, tmp_path: Path, binary: Callable[[str], Path]
) -> None:
    """The clock of a host that has joined, and of its worker; the service's own is right."""
    config = configured(tiny_dense, workers__engine="fake", workers__count=1, service__metrics="127.0.0.1:0")
    jump(clock := tmp_path / "clock", 0.0)
    inside = (sys.executable, "-m", "tests.prometheus.clock_of_host", str(clock))
    rules = hasty_rules(tmp_path / "rules", ("DoraClockOff",))
    async with (
        running(config) as handle,
        scraping(binary("prometheus"), handle.metrics, tmp_path, rules) as prometheus,
        Operator(handle.address, handle.token) as operator,
        training(handle),
    ):
        options = ("--workers", "1")
        h1 = await joining(handle.address, handle.tokens[Role.HOST], "h1", tmp_path / "h1.log", *options, inside=inside)
        try:
            await until(operator, are_ready(2))
            for off_s in (HOUR_S, -HOUR_S):
                await prometheus.firing(set())
                jump(clock, off_s)
                await prometheus.firing({"DoraClockOff"})
                jump(clock, 0.0)
                await prometheus.firing(set())
        finally:
            await ended(h1)
        assert await prometheus.ever_fired() == {"DoraClockOff"}
