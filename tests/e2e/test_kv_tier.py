"""A service with the shared KV tier, LMCache's own server: a worker dies, the server dies, and nothing else is lost."""

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from dora.client import Operator, Trainer
from dora.kvtier import server
from dora.rpc import dora_pb2 as pb
from tests.contract.tiers import needs_lmcache
from tests.service import check_promises, configured, during, running, train, until

pytestmark = [pytest.mark.e2e, pytest.mark.full, needs_lmcache]

GROUPS = 4
STEPS = 12
TIER = {"kv__tier": "lmcache", "kv__tier_mb": 64, "rollout__max_tokens": 200, "rollout__ignore_eos": True}


def all_reach_the_tier(status: pb.Status) -> bool:
    return status.kv_tier.up and status.kv_tier.workers == 2


async def test_a_worker_dies_then_the_tier_and_nothing_else_is_lost(tiny_dense: Path) -> None:
    async with (
        running(configured(tiny_dense, **TIER)) as handle,
        Operator(handle.address, handle.token) as operator,
        Trainer(handle.address, token=handle.token) as trainer,
    ):
        status = await until(operator, all_reach_the_tier)
        training = asyncio.create_task(train(handle, trainer, STEPS, GROUPS))
        await during(training, until(operator, lambda status: status.counters["tier_tokens_kept"] > 500))
        os.kill(status.workers[0].pid, signal.SIGKILL)
        status = await during(training, until(operator, lambda status: status.counters["tier_tokens_found"] > 0))
        assert status.counters["requests_orphaned"] > 0
        await during(training, until(operator, lambda status: status.kv_tier.used_bytes > 0))  # asked for now and then
        await during(training, until(operator, all_reach_the_tier))
        os.kill(server_of(handle.run_folder), signal.SIGKILL)
        check_promises(await training, window=2, groups=GROUPS)
        status = await until(operator, lambda status: status.kv_tier.restarts == 1 and all_reach_the_tier(status))
        assert status.counters["workers_lost"] == 1 and status.counters["tier_losses"] == 2
        for broken in ("groups_lost", "c1_violations", "tier_chunks_damaged"):
            assert status.counters[broken] == 0
        segment = Path("/dev/shm", server.SEGMENT_PREFIX + server.segment_of(handle.run_folder))
        assert is_there(segment)
    assert not is_there(segment), "the server ends with the service"


def is_there(file: Path) -> bool:
    return file.exists()


def server_of(run_folder: Path) -> int:
    """The process that serves this run folder."""
    for process in psutil.process_iter(["pid", "cmdline"]):
        command = process.info["cmdline"] or ()
        if server.__file__ in command and str(run_folder) in command:
            return int(process.info["pid"])
    raise AssertionError("no server runs")
