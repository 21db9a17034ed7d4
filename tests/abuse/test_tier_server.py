"""The shared KV tier's server dies, says nonsense, says nothing: it is started again, and nobody waits for it."""

import asyncio
import contextlib
import os
import stat
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from dora.config import Config, KvConfig, ServiceConfig
from dora.errors import InvalidValue
from dora.kvtier import server
from dora.orchestrator.hosts import tier_server
from dora.orchestrator.hosts.tier_server import TierServer, check_tier
from dora.orchestrator.recording.storage import Storage
from tests.refusals import refused

TELLS = """echo '{"used_bytes": 1, "size_bytes": 2, "chunks": 3}'"""
LIVES = "exec tail -f /dev/null"


def python(folder: Path, *lines: str) -> str:
    """An interpreter that does this, whatever it is given."""
    script = folder / "python"
    script.write_text("\n".join(["#!/bin/sh", *lines]))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


@contextlib.asynccontextmanager
async def supervised(folder: Path, *lines: str) -> AsyncIterator[TierServer]:
    """A server that does this, until the end of the block."""
    kv = KvConfig(tier="lmcache", tier_python=python(folder, *lines))
    tier = TierServer(kv, 32, folder, Storage())
    tier.start()
    try:
        yield tier
    finally:
        await tier.close()


def is_there(file: Path) -> bool:
    return file.exists()


async def until(condition: Callable[[], bool]) -> None:
    loop = asyncio.get_running_loop()
    holds = loop.create_future()

    def look() -> None:
        if condition():
            holds.set_result(None)
        elif not holds.done():
            loop.call_soon(look)

    look()
    await asyncio.wait_for(holds, 60)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_server, "PAUSE_S", 0.0)


async def test_what_it_says_is_what_operators_see(tmp_path: Path) -> None:
    async with supervised(tmp_path, TELLS, LIVES) as tier:
        assert not tier.status(0).up and tier.status(0).reason == "it is starting"
        await until(lambda: tier.status(0).up)
        status = tier.status(2)
        assert (status.used_bytes, status.size_bytes, status.chunks, status.workers) == (1, 2, 3, 2)
        assert (status.restarts, status.reason) == (0, "")
    assert tier.pid == 0


async def test_one_that_dies_is_started_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    died = tmp_path / "died"
    async with supervised(tmp_path, TELLS, f"test -e {died} && {LIVES}", f"touch {died}; exit 7") as tier:
        await until(lambda: tier.status(0).restarts == 1 and tier.status(0).up)
    assert "the KV tier's server is restarted: it ended with 7 (its log: kv-tier.log)" in caplog.text


@pytest.mark.parametrize("said", ["garbage", "[]", "{}", '{"used_bytes": [], "size_bytes": 1, "chunks": 1}'])
async def test_one_that_says_nonsense_is_replaced(tmp_path: Path, said: str) -> None:
    async with supervised(tmp_path, f"echo '{said}'", LIVES) as tier:
        await until(lambda: tier.status(0).restarts == 2)
        assert not tier.status(0).up


async def test_one_that_says_nothing_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_server, "SILENCE_S", 0.05)
    async with supervised(tmp_path, TELLS, LIVES) as tier:
        await until(lambda: tier.status(0).restarts == 2)


async def test_one_that_cannot_be_started_is_tried_again(tmp_path: Path) -> None:
    async with supervised(tmp_path, TELLS) as tier:
        os.unlink(python(tmp_path))
        await until(lambda: "could not be started" in tier.status(0).reason)
        python(tmp_path, TELLS, LIVES)
        await until(lambda: tier.status(0).up)


async def test_one_that_does_not_end_is_made_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_server, "STOP_S", 0.1)
    async with supervised(tmp_path, "trap '' TERM", TELLS, "while :; do read -r never < /dev/zero; done") as tier:
        await until(lambda: tier.status(0).up)
    assert tier.pid == 0


async def test_what_a_killed_server_leaves_is_removed(tmp_path: Path) -> None:
    segment = Path("/dev/shm", server.SEGMENT_PREFIX + server.segment_of(tmp_path))
    async with supervised(tmp_path, f"touch {segment}", TELLS, "kill -9 $$") as tier:
        await until(lambda: tier.status(0).restarts == 1)
        assert is_there(segment)
    assert not is_there(segment)


async def test_without_lmcache_the_service_does_not_start(tmp_path: Path) -> None:
    for found, lines in (("none", ["echo none"]), ("0.4.2", ["echo 0.4.2"]), ("nothing", [])):
        config = Config(kv=KvConfig(tier="lmcache", tier_python=python(tmp_path, *lines)))
        with refused(
            InvalidValue,
            field="kv.tier_python",
            names=(
                server.VERSION,
                found,
            ),
        ):
            await check_tier(config)
    with refused(InvalidValue, field="kv.tier_python"):
        await check_tier(Config(kv=KvConfig(tier="lmcache", tier_python=str(tmp_path / "absent"))))


async def test_a_tier_for_which_there_is_no_room_is_refused(tmp_path: Path) -> None:
    good = python(tmp_path, f"echo {server.VERSION}")
    with refused(InvalidValue, field="kv.tier_mb", value=4194304):
        await check_tier(Config(kv=KvConfig(tier="lmcache", tier_python=good, tier_mb=1 << 22)))
    deep = tmp_path / ("long" * 30)
    service = ServiceConfig(run_folder=str(deep))
    with refused(InvalidValue, field="service.run_folder"):
        await check_tier(Config(kv=KvConfig(tier="lmcache", tier_python=good, tier_mb=16), service=service))
    assert (
        await check_tier(Config(kv=KvConfig(tier="lmcache", tier_python=good, tier_mb=16))) == "lmcache 0.5.6, 16 MiB"
    )
