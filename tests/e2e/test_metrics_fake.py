"""The metrics of a whole service with fake engines, as a scraper reads them."""

import asyncio
import socket
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dora.agents.front.run import FrontOptions, front
from dora.client import Operator, Prompts, Sessions, Trainer
from dora.client.sessions import Session
from dora.data.engine_times import HISTOGRAMS
from dora.errors import InvalidValue
from dora.orchestrator.hosts.fronts import Front
from dora.orchestrator.main import ServiceHandle
from dora.orchestrator.metrics.of_hosts import HOST
from dora.orchestrator.metrics.of_service import SERVICE
from dora.orchestrator.rollout.distributions import DISTRIBUTIONS
from dora.rpc.room import host_of_peer
from dora.system import probes
from tests.e2e.agents import agent, are_ready, host
from tests.refusals import refused
from tests.service import configured, during, move_one, running, train, train_beside, until

STEPS: Final = 4
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def fake(model: Path, **fields: Any) -> Any:
    plain = {"workers__engine": "fake", "workers__count": 2, "service__metrics": "127.0.0.1:0", "window__size": 2}
    return configured(model, **{**plain, **fields})


async def get(handle: ServiceHandle, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://{handle.metrics}{path}") as reply:
        return reply.status, await reply.text()


async def scraped(handle: ServiceHandle, path: str = "/metrics") -> Samples:
    """The samples of a page, by name and labels."""
    code, text = await get(handle, path)
    assert code == 200, text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(found: Samples, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels."""
    return sum(value for (each, at), value in found.items() if each == name and labels.items() <= dict(at).items())


async def test_a_scrape_has_every_metric_and_their_values_are_those_of_the_status(
    tiny_dense: Path, tmp_path: Path
) -> None:
    folders = {"service__state": str(tmp_path / "state"), "record": str(tmp_path / "record")}
    long = {"rollout__ignore_eos": True, "rollout__max_tokens": 1500, "workers__max_model_len_tokens": 2048}
    config = fake(tiny_dense, workers__kv_tokens=16384, workers__orphan_timeout_s=0.5, **long, **folders)
    async with running(config) as handle, Trainer(handle.address, token=handle.token) as trainer:
        async with Operator(handle.address, handle.token) as operator:
            trained = len(await train_beside(handle, trainer, STEPS, 4, move_one(operator)))
            found, status = await scraped(handle), await operator.status()
        names = {name for name, _ in found}
        unsaid = {"dora_trainer_signal", "dora_mismatch_kl", "dora_mismatch_ratio_outside"}
        assert {each.name for each in SERVICE} - names == unsaid, "the trainer has sent no signals"
        assert not {f"{each.name}_bucket" for each in DISTRIBUTIONS} - names
        assert total(found, "dora_groups_trained_total") == status.counters["groups_trained"] == 4 * trained
        assert total(found, "dora_workers", state="ready") + total(found, "dora_workers", state="loading") > 0
        assert total(found, "dora_step_seconds_count") == trained - 1 == total(found, "dora_publish_seconds_count") - 1
        steps = {step.step: step for step in status.steps}
        assert all(abs(sum(each.parts_s.values()) - each.took_s) < 1e-3 for step, each in steps.items() if step)
        assert (
            abs(total(found, "dora_step_part_seconds_total") - sum(sum(s.parts_s.values()) for s in steps.values()))
            < 0.01
        )
        assert total(found, "dora_step_part_seconds_total", part="publishing") > 0
        assert total(found, "dora_reward_count") == 4 * 4 * trained == total(found, "dora_staleness_steps_count")
        assert total(found, "dora_moves_total", result="done", reason="operator") >= 1
        assert total(found, "dora_copy_seconds_count", kind="move") >= 1
        assert total(found, "dora_journal_sync_seconds_count") > 0 and total(found, "dora_token_seconds_count") > 0
        assert total(found, "dora_storage_free_bytes", place="record") > 0
        assert total(found, "process_resident_memory_bytes") > 0


async def test_a_host_has_a_page_with_its_engines_and_both_are_discovered(tiny_dense: Path) -> None:
    async with running(fake(tiny_dense)) as handle, Trainer(handle.address, token=handle.token) as trainer:
        await train(handle, trainer, steps=2, groups=2)
        async with aiohttp.ClientSession() as session, session.get(f"http://{handle.metrics}/sd") as reply:
            targets = await reply.json()
        assert [each["labels"]["__metrics_path__"] for each in targets] == ["/metrics", "/hosts/local/metrics"]
        assert all(each["targets"] == [handle.metrics] for each in targets)
        found = await scraped(handle, "/hosts/local/metrics")
        pools = ("dora_host_pool_memory_bytes", "dora_host_pool_spill_bytes", "dora_host_pool_parked_requests")
        assert {each.name for each in HOST} - {name for name, _ in found} == set(pools), "it has no pool"
        assert all(total(found, f"{each.name}_count") for each in HISTOGRAMS)
        assert total(found, "vllm:request_success_total", finished_reason="stop") > 0
        engines = {dict(labels)["engine"] for name, labels in found if name == "vllm:generation_tokens_total"}
        assert engines == {"0", "1"} and total(found, "vllm:generation_tokens_total") > 0


async def pages(handle: ServiceHandle) -> list[str]:
    """The pages that Prometheus discovers."""
    async with aiohttp.ClientSession() as session, session.get(f"http://{handle.metrics}/sd") as reply:
        return [each["labels"]["__metrics_path__"] for each in await reply.json()]


async def test_a_host_that_joins_has_a_page_until_it_leaves(tiny_dense: Path, tmp_path: Path) -> None:
    async with (
        running(fake(tiny_dense, workers__count=0)) as handle,
        Operator(handle.address, handle.token) as operator,
        Trainer(handle.address, token=handle.token) as trainer,
    ):
        async with agent(handle, "h1", tmp_path / "h1.log", "--workers", "1"):
            await until(operator, are_ready(1))
            await train(handle, trainer, 4, groups=2)  # the last of them with a version that the host has fetched
            assert await pages(handle) == ["/metrics", "/hosts/local/metrics", "/hosts/h1/metrics"]
            found = await scraped(handle, "/hosts/h1/metrics")
            assert total(found, "vllm:generation_tokens_total") > 0 and total(found, "dora_host_memory_bytes") > 0
            assert not total(await scraped(handle, "/hosts/local/metrics"), "vllm:generation_tokens_total")
            assert total(await scraped(handle), "dora_relay_seconds_count") > 0
        await until(operator, lambda status: host(status, "h1").state == "lost")
        assert await pages(handle) == ["/metrics", "/hosts/local/metrics"]
        assert total(await scraped(handle), "dora_hosts", state="lost") == 1


async def targets(handle: ServiceHandle, host: str = "") -> list[str]:
    """The addresses that Prometheus discovers. ``host``: under which it reaches the service."""
    headers = {"Host": host} if host else {}
    async with aiohttp.ClientSession() as http, http.get(f"http://{handle.metrics}/sd", headers=headers) as reply:
        return [address for each in await reply.json() for address in each["targets"]]


async def test_a_front_is_discovered_while_it_serves(tiny_dense: Path) -> None:
    async with running(fake(tiny_dense, workers__count=0)) as handle:
        port = int(handle.metrics.rpartition(":")[2])
        async with front(FrontOptions(handle.address, handle.token, "127.0.0.1:0", model=tiny_dense)) as url:
            own = url.removeprefix("http://")
            while own not in await targets(handle):
                pass
            assert own not in await targets(handle, f"10.0.0.1:{port}"), "it is on loopback"
            async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as reply:
                assert "dora_front_sessions_open 0" in await reply.text()
        while own in await targets(handle):
            pass


def test_a_front_at_every_address_is_found_where_its_host_is() -> None:
    assert Front.of("0.0.0.0:80", "127.0.0.1", secure=False).reached_from("gpu-1") == "gpu-1:80"
    assert Front.of("[::]:80", "10.0.0.7", secure=True).reached_from("gpu-1") == "10.0.0.7:80"
    assert Front.of("10.0.0.9:80", "10.0.0.7", secure=True).reached_from("gpu-1") == "10.0.0.9:80"
    assert Front.of("127.0.0.1:80", "127.0.0.1", secure=False).reached_from("gpu-1") is None
    assert host_of_peer("ipv4:10.0.0.7:5001") == "10.0.0.7" and host_of_peer("ipv6:%5B::1%5D:5001") == "::1"
    for address in ("", "a", "a:0", "a:65536", "a b:1", "http://a:1", "a:1/x", f"{'a' * 254}:1"):
        with refused(InvalidValue, field="address"):
            Front.of(address, "", secure=False)


async def ask_once(session: Session) -> None:
    if not session.turn.number:
        await session.ask([5, 6], name="tool")
    await session.end(1.0)


async def test_the_time_of_tools_is_counted_a_turn(tiny_dense: Path) -> None:
    config = fake(tiny_dense, prompts="none", reward__function="dora.rewards.tiny:score", rollout__max_tokens=12)
    prompts = [{"text": "ab", "prompt_id": f"p{n}", "group_size": 2, "environment": "tool"} for n in range(4)]
    async with running(config) as handle, Trainer(handle.address, token=handle.token) as trainer:
        async with (
            Prompts(handle.address, handle.token) as submitting,
            Sessions(handle.address, handle.token) as sessions,
        ):
            await submitting.submit(prompts)
            driving = asyncio.create_task(sessions.drive("tool", ask_once))
            await during(driving, train(handle, trainer, 2, groups=2))
            found = await scraped(handle)
            driving.cancel()
        assert total(found, "dora_turns_ended_total") == 16 == total(found, "dora_tool_seconds_count")
        assert total(found, "dora_first_token_seconds_count") == 8
        assert total(found, "dora_environment_drivers") == 1


async def test_other_pages_are_refused_and_a_scraper_that_hangs_disturbs_nothing(
    tiny_dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "LIFETIME_S", 1.0)
    monkeypatch.setattr(probes, "CONNECTIONS_MAX", 4)
    async with running(fake(tiny_dense)) as handle:
        assert (await get(handle, "/hosts/h9/metrics"))[0] == 404
        code, text = await get(handle, "/")
        assert code == 404 and "/metrics" in text and text.count("\n") == 1
        name, _, port = handle.metrics.rpartition(":")
        hanging = [await asyncio.open_connection(name, int(port)) for _ in range(6)]
        for _, writer in hanging[:2]:
            writer.write(b"GET /metrics HTTP/1.1\r\n")  # and nothing more
        ended = await asyncio.gather(*(reader.read() for reader, _ in hanging), return_exceptions=True)
        assert len(ended) == 6, "those too many at once, the others after their time"
        assert (await scraped(handle))["dora_workers", (("state", "lost"),)] == 0
        for _, writer in hanging:
            writer.close()


async def test_a_port_in_use_is_told_with_its_owner(tiny_dense: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config = fake(tiny_dense, workers__count=0, service__metrics=address)
        with refused(InvalidValue, field="--metrics", value=address, names=(address,)):
            async with running(config):
                pass
