"""``dora doctor --service`` over a service and a host that has joined, each a process."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from dora.client import Operator, Trainer
from dora.errors import Conflict
from dora.orchestrator.main import ServiceHandle
from dora.rpc import dora_pb2 as pb
from tests.e2e.agents import agent, are_ready, ended, joining
from tests.e2e.test_many_hosts import FAKE, Run
from tests.hosts import Hosts, Link, has_hosts
from tests.refusals import refused
from tests.service import configured, running, train, until
from tests.tls_files import another, cluster, tls

OF_THIS_MACHINE: Final = {"memory", "disk", "disk rate"}


async def doctor(handle: ServiceHandle, *options: str) -> tuple[int, Any]:
    """The exit code of the command, and its document."""
    argv = [sys.executable, "-m", "dora", "doctor", "--service", handle.address, "--json", *options]
    env = {**os.environ, "DORA_TOKEN": "" if "--tls" in options else handle.token}
    process = await asyncio.create_subprocess_exec(*argv, env=env, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    return process.returncode or 0, json.loads(out)


def found(document: Any, host: str) -> dict[str, Any]:
    return {each["check"]: each for each in document["findings"] if each["host"] == host}


async def test_two_hosts_are_examined_and_nothing_is_to_be_done(tiny_dense: Path, tmp_path: Path) -> None:
    config = configured(tiny_dense, workers__engine="fake", workers__count=1)
    async with (
        running(config) as handle,
        Operator(handle.address, handle.token) as operator,
        agent(handle, "h1", tmp_path / "h1.log", "--workers", "1"),
        Trainer(handle.address, token=handle.token) as trainer,
    ):
        await until(operator, are_ready(2))
        await train(handle, trainer, 2, groups=2)
        code, document = await doctor(handle, "--probe")
        results = [each async for each in operator.examine()]
    todo = {each["check"] for each in document["findings"] if not each["ok"]}
    assert todo <= OF_THIS_MACHINE and document["ok"] is not bool(todo) and code == bool(todo)
    of_h1 = {"link to h1", "move to h1", "fetch from h1"}
    assert set(found(document, "local")) == {
        *("workers", "versions", "clock", "memory", "disk", "disk rate", "load", "move", *of_h1)
    }
    of_local = {each.replace("h1", "local") for each in of_h1}
    assert set(found(document, "h1")) - {"fetch"} == set(found(document, "local")) - of_h1 | of_local
    how = {each["check"]: each["how"] for each in document["findings"]}
    assert how["clock"] == "now" and how["load"] == "run" and how["move"] in ("run", "estimate")
    assert how["move to h1"] == how["fetch from local"] == "probe"
    assert [each.host for each in results] == ["local", "h1"]
    for each in results:
        (link,) = each.found.links
        assert not link.kv_bytes and not each.found.HasField("fetch"), "no probe was asked for"
        assert link.bytes_per_s > 1e6 and 0 < link.round_trip_s < 10 and not link.trouble
        assert abs(each.clock_ahead_s) <= each.clock_error_s + 0.1
        assert each.found.version_bytes > 0 and each.found.disk_bytes_per_s > 0 and each.load_s > 0


async def test_certificates_are_examined_and_a_host_whose_files_are_bad_is_named(
    tiny_dense: Path, tmp_path: Path
) -> None:
    folder = cluster(tmp_path / "tls")
    short = tmp_path / "short"
    another(folder, "host", short, ends_s=86400.0)
    config = configured(tiny_dense, workers__engine="fake", workers__count=1, tls__folder=str(folder / "service"))
    own = tls(folder, "operator")
    async with running(config) as handle, Operator(handle.address, tls=own) as operator:
        h1 = await joining(handle.address, "", "h1", tmp_path / "h1.log", "--workers", "0", "--tls", str(short))
        try:
            await until(operator, lambda status: len(status.hosts) == 2 and list(status.hosts[1].versions))
            code, document = await doctor(handle, "--tls", str(folder / "operator"))
        finally:
            await ended(h1)
    assert code == 1 and not document["ok"]
    assert found(document, "local")["certificate"]["ok"] and "link to h1" in found(document, "local")
    todo = {check for check, each in found(document, "h1").items() if not each["ok"]}
    assert todo - OF_THIS_MACHINE - {"link to local"} == {"certificate"}, "other work may slow the link"
    assert "renew it" in found(document, "h1")["certificate"]["action"]


async def test_a_second_examination_is_refused_and_a_host_that_is_lost_is_named(
    tiny_dense: Path, tmp_path: Path
) -> None:
    config = configured(tiny_dense, workers__engine="fake", workers__count=0)
    async with running(config) as handle, Operator(handle.address, handle.token) as operator:
        h1 = await joining(handle.address, handle.token, "h1", tmp_path / "h1.log", "--workers", "0")
        await until(operator, lambda status: len(status.hosts) == 2 and list(status.hosts[1].versions))
        results: list[pb.ExaminedHost] = []
        async for each in operator.examine():
            results.append(each)
            if len(results) == 1:
                with refused(Conflict, field="examination"):
                    async for _ in operator.examine():
                        pytest.fail("two at once")
                await ended(h1)
    assert [each.host for each in results] == ["local", "h1"]
    assert results[1].trouble and not results[1].HasField("found")


@pytest.mark.full
@pytest.mark.skipif(not has_hosts(), reason="no network namespaces and TUN devices for this user")
def test_a_link_that_loses_packets_is_named(tiny_dense: Path, tmp_path: Path) -> None:
    """Three machines: of a service, of a rollout host with a bad cable, and of an operator."""
    with Hosts(3) as hosts:
        run = Run(hosts, tiny_dense, tmp_path, [1], **FAKE, workers__count=1)
        hosts.link(0, 1, Link(delay_s=0.002, loss=0.05))
        argv = [sys.executable, "-m", "dora", "doctor", "--service", run.reached["address"], "--json"]
        out, _ = hosts.start(2, argv, {"DORA_TOKEN": run.reached["token"]}).communicate(timeout=300)
        document = json.loads(out)
        assert not found(document, "local")["link to h1"]["ok"] and not found(document, "h1")["link to local"]["ok"]
        assert found(document, "h1")["clock"]["ok"] and found(document, "h1")["versions"]["ok"]
        run.end()
