"""Runs with mutual TLS: a service, hosts, workers and a trainer with certificates, which are replaced meanwhile."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

import dora
from dora.agents.front.child import FrontProcess
from dora.client import Operator, Prompts
from dora.orchestrator.main import ServiceHandle
from dora.rpc import proven
from dora.rpc.errors import PermissionDenied, ServiceUnavailable, Unauthenticated
from dora.rpc.roles import Role
from dora.tls import Tls
from dora.tls.authority import AUTHORITY, make_cluster
from tests.e2e.agents import are_ready, ended, joining
from tests.refusals import refused
from tests.service import ask_move, check_promises, configured, during, running, train, train_beside, until
from tests.tls_files import another, cluster, shows, tls

GROUPS = 4
LONG = {
    "workers__engine": "fake",
    "rollout__ignore_eos": True,
    "rollout__max_tokens": 1500,
    "workers__max_model_len_tokens": 2048,
    "workers__kv_tokens": 16384,
    "kv__pool_mb": 64,
    "kv__transports": "tcp",
}
IDLE = {"workers__engine": "fake", "workers__count": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cluster(tmp_path_factory.mktemp("tls"))


async def asked(handle: ServiceHandle, own: Tls | None, token: str = "", timeout_s: float = 10.0) -> None:
    async with Operator(handle.address, token, tls=own, timeout_s=timeout_s) as operator:
        await operator.status()


@pytest.mark.full
async def test_a_run_with_mutual_tls_whose_certificates_and_authority_are_replaced(
    tiny_dense: Path, tmp_path: Path
) -> None:
    """The service's host and a joined one; certificates alone identify all, except the workers that a host starts."""
    folder = cluster(tmp_path / "tls")
    service = str(folder / "service")
    config = configured(tiny_dense, window__size=2, workers__count=1, tls__folder=service, **LONG)
    async with AsyncExitStack() as stack:
        handle = await stack.enter_async_context(running(config, processes=True))
        operator = await stack.enter_async_context(Operator(handle.address, tls=tls(folder, "operator")))
        trainer = await stack.enter_async_context(dora.Trainer(handle.address, tls=tls(folder, "trainer")))
        as_host = ("--tls", str(folder / "host-127.0.0.1"))
        h1 = await joining(handle.address, "", "h1", tmp_path / "h1.log", *as_host)
        stack.push_async_callback(ended, h1)
        await until(operator, are_ready(2))
        enough = asyncio.Event()
        training = asyncio.create_task(train(handle, trainer, steps=4, groups=GROUPS, enough=enough))
        await during(training, moves(operator, 2))
        before = (folder / "service/cert.pem").read_bytes()
        make_cluster(folder, ["127.0.0.1"], list(Role), days=30, authority_days=365, new_authority=True)
        assert (folder / "service/cert.pem").read_bytes() != before
        async with Operator(handle.address, tls=tls(folder, "operator")) as renewed:
            await during(training, moves(renewed, 2))  # between workers that read the files again
        h2 = await joining(handle.address, "", "h2", tmp_path / "h2.log", *as_host)
        stack.push_async_callback(ended, h2)
        await during(training, until(operator, are_ready(3)))
        await during(training, moves(operator, 2))
        enough.set()
        steps = await training
        status = await operator.status()
    check_promises(steps, window=2, groups=GROUPS)
    counters = status.counters
    assert counters["groups_trained"] == len(steps) * GROUPS
    assert counters["groups_lost"] == counters["workers_lost"] == counters["c1_violations"] == 0
    assert counters["migrations_kv"] >= 6 and counters["migrations_failed"] == 0
    assert "refused" not in (tmp_path / "h1.log").read_text() + (tmp_path / "h2.log").read_text()


async def test_a_short_run_with_mutual_tls_whose_certificates_are_replaced(tiny_dense: Path, tmp_path: Path) -> None:
    folder = cluster(tmp_path / "tls")
    config = configured(tiny_dense, workers__count=2, tls__folder=str(folder / "service"), **{**LONG, "kv__pool_mb": 0})
    async with (
        running(config) as handle,
        Operator(handle.address, tls=tls(folder, "operator")) as operator,
        dora.Trainer(handle.address, tls=tls(folder, "trainer")) as trainer,
    ):

        async def moved_and_replaced() -> None:
            await moves(operator, 1)
            make_cluster(folder, ["127.0.0.1"], list(Role), days=30, authority_days=365, new_authority=True)
            await asked(handle, tls(folder, "operator"))

        steps = await train_beside(handle, trainer, 1, 2, moved_and_replaced())
        counters = (await operator.status()).counters
    check_promises(steps, window=2, groups=2)
    assert counters["groups_lost"] == counters["workers_lost"] == counters["migrations_failed"] == 0


async def moves(operator: Operator, more: int) -> None:
    """Moves requests until so many more have moved with their KV."""
    before = (await operator.status()).counters["migrations_kv"]
    async for status in operator.watch(period_ms=50):
        if status.counters["migrations_kv"] >= before + more:
            return
        await ask_move(operator, status)


async def test_a_service_takes_single_files_and_a_folder(folder: Path, tiny_dense: Path) -> None:
    parts = {part: str(folder / "service" / f"{part}.pem") for part in ("cert", "key", "ca")}
    single = {"tls__cert": parts["cert"], "tls__key": parts["key"], "tls__ca": parts["ca"]}
    for fields in (single, {"tls__folder": str(folder / "service")}):
        async with running(configured(tiny_dense, **IDLE, **fields)) as handle:
            await asked(handle, tls(folder, "operator"))
            with pytest.raises(PermissionDenied):
                await asked(handle, tls(folder, "trainer"), handle.token)
            if fields is single:
                with pytest.raises(ServiceUnavailable):
                    await asked(handle, None, handle.token, timeout_s=0.5)


async def test_clients_may_need_no_certificate(folder: Path, tiny_dense: Path) -> None:
    """With tls.clients = token the connection is encrypted, and tokens are needed as in the clear."""
    config = configured(tiny_dense, **IDLE, tls__folder=str(folder / "service"), tls__clients="token")
    async with running(config) as handle:
        only_ca = Tls(tls(folder, "operator").ca)
        await asked(handle, only_ca, handle.token)
        for token in ("", "wrong"):
            with pytest.raises(Unauthenticated):
                await asked(handle, only_ca, token)
        with pytest.raises(Unauthenticated):
            await asked(handle, tls(folder, "operator"))  # it is not asked for its certificate
        stranger = cluster(folder / "stranger")
        with pytest.raises(ServiceUnavailable) as raised:
            await asked(handle, Tls(tls(stranger, "operator").ca), handle.token)
        assert "--tls-ca" in str(raised.value)


async def test_only_names_of_the_domain_give_roles(folder: Path, tiny_dense: Path) -> None:
    config = configured(tiny_dense, **IDLE, tls__folder=str(folder / "service"), tls__domain="elsewhere")
    async with running(config) as handle:
        with pytest.raises(Unauthenticated):
            await asked(handle, tls(folder, "operator"))
        await asked(handle, tls(folder, "operator"), handle.token)
        async with Prompts(handle.address, handle.token, tls=tls(folder, "session")) as prompts:
            await prompts.cancel(["q1"])


async def test_a_client_outlives_the_certificate_with_which_it_connected(
    tiny_dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cluster(tmp_path / "tls")
    async with running(configured(tiny_dense, **IDLE, tls__folder=str(folder / "service"))) as handle:
        own = another(folder, "operator", tmp_path / "operator", ends_s=5.0)  # while it connects, on a busy machine
        async with Operator(handle.address, tls=own) as operator:
            watching = operator.watch(period_ms=50)
            await anext(watching)
            with refused(Unauthenticated, field="certificate"):
                while True:  # on the same connection, until the certificate has ended
                    await operator.status()
            monkeypatch.setattr(proven, "LOOK_S", 0.0)
            another(folder, "operator", tmp_path / "operator")
            await operator.status()
            await anext(watching)


async def read(handle: ServiceHandle, own: Tls, page: str, token: str = "") -> tuple[int, str]:
    """A page of the metrics, over a connection of its own."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=shows(own))) as http,
        http.get(f"https://{handle.metrics}{page}", headers=headers) as reply,
    ):
        return reply.status, await reply.text()


async def test_metrics_are_for_readers_by_certificate_or_token(folder: Path, tiny_dense: Path) -> None:
    guarded = {**IDLE, "tls__folder": str(folder / "service"), "service__metrics": "127.0.0.1:0"}
    async with running(configured(tiny_dense, **guarded)) as handle:
        for role in ("metrics", "operator", "owner"):
            assert "dora_step " in (await read(handle, tls(folder, role), "/metrics"))[1]
        assert (await read(handle, tls(folder, "session"), "/metrics", handle.tokens[Role.METRICS]))[0] == 403
        assert (await read(handle, tls(folder, "metrics"), "/metrics", "x"))[0] == 401
        code, pages = await read(handle, tls(folder, "metrics"), "/sd")
        assert code == 200 and '"__scheme__": "https"' in pages
        with pytest.raises(aiohttp.ClientConnectionError):
            await read(handle, Tls(tls(folder, "metrics").ca), "/metrics", handle.tokens[Role.METRICS])
    async with running(configured(tiny_dense, **guarded, tls__clients="token")) as handle:
        plain = Tls(tls(folder, "metrics").ca)
        for token, status in (("", 401), ("x", 401), (handle.tokens[Role.SESSION], 403)):
            code, text = await read(handle, plain, "/metrics", token)
            assert code == status and text.count("\n") == 1
        for role in (Role.METRICS, Role.OPERATOR, Role.OWNER):
            assert (await read(handle, plain, "/metrics", handle.tokens[role]))[0] == 200


async def test_the_front_of_a_service_under_tls(folder: Path, tiny_dense: Path) -> None:
    """It has the service's certificate, and the rewarded answer reaches the trainer."""
    config = configured(
        tiny_dense,
        workers__engine="fake",
        workers__count=1,
        prompts="none",
        reward__function="tests.unit.reward_functions:process_id",
        tls__folder=str(folder / "service"),
    )
    agent = tls(folder, "environment")
    asked = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 4}
    async with (
        running(config) as handle,
        dora.Trainer(handle.address, tls=tls(folder, "trainer")) as trainer,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=shows(agent))) as http,
    ):
        process = FrontProcess("127.0.0.1:0", None, tls(folder, "service"), "certificate")
        process.start(handle.address, handle.token, handle.model)
        try:
            training = asyncio.create_task(train(handle, trainer, steps=1, groups=1))
            async with http.post(f"{process.url}/sessions/s/v1/chat/completions", json=asked) as reply:
                assert reply.status == 200, await reply.text()
            async with http.post(f"{process.url}/sessions/s/close", json={"reward": 0.5}) as reply:
                assert reply.status == 200, await reply.text()
            ((group,),) = await training
        finally:
            await process.stop()
    assert [each.reward for each in group.trajectories] == [0.5]


async def test_a_service_without_tls_says_so_to_a_client_with_it(folder: Path, tiny_dense: Path) -> None:
    async with running(configured(tiny_dense, **IDLE)) as handle:
        with pytest.raises(ServiceUnavailable) as raised:
            await asked(handle, tls(folder, "operator"), handle.token)
        assert "TLS" in str(raised.value)
        assert (folder / AUTHORITY).is_dir()
