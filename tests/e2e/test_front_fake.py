"""Agents of OpenAI's own client against a service with fake engines: what they saw is what the trainer gets."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from openai import AsyncOpenAI
from rich.console import Console

import dora
from dora.agents.front.child import FrontProcess
from dora.agents.front.run import FrontOptions, front
from dora.client import Operator
from dora.config import Config
from dora.data.trajectory import Trajectory
from dora.data.verdict import LOG_MAX_BYTES
from dora.ops.page.head import head_of
from dora.ops.view.service import pace, status_table
from dora.orchestrator.rollout.presence import clock_time
from dora.rpc.errors import ServiceUnavailable
from dora.rpc.roles import Role
from dora.system.process_tree import descendants
from tests.e2e.restarts import Killed, settings_of
from tests.refusals import refused
from tests.service import check_promises, configured, running, train, until
from tests.snippets import snippet

GROUPS = 3


def config_of(model: Path, **fields: Any) -> Config:
    return configured(
        model,
        workers__engine="fake",
        prompts="none",
        reward__function="tests.unit.reward_functions:process_id",
        window__size=2,
        rollout__max_tokens=8,
        **fields,
    )


@asynccontextmanager
async def agents(url: str, session: str = "") -> AsyncIterator[AsyncOpenAI]:
    base = f"{url}/sessions/{session}/v1" if session else f"{url}/v1"
    async with AsyncOpenAI(base_url=base, api_key="any", max_retries=0) as api:
        yield api


async def told(url: str, session: str, **body: Any) -> None:
    """Closes a session."""
    async with aiohttp.ClientSession() as http, http.post(f"{url}/sessions/{session}/close", json=body) as reply:
        assert reply.status == 200, await reply.text()


async def converse(url: str, session: str, turns: int) -> list[int]:
    """A session of some turns. Returns all its tokens, as the replies said."""
    chat: list[Any] = [{"role": "user", "content": "abc"}]
    async with agents(url, session) as api:
        for _ in range(turns):
            reply = await api.chat.completions.create(
                model="policy", messages=chat, max_tokens=6, extra_body={"return_token_ids": True}
            )
            chat.append({"role": "assistant", "content": reply.choices[0].message.content})
            chat.append({"role": "user", "content": "more"})
            tokens = [*reply.prompt_token_ids, *reply.choices[0].token_ids]  # type: ignore[attr-defined]
    return tokens


def tokens_of(trajectory: Trajectory) -> list[int]:
    return [*trajectory.prompt_token_ids.tolist(), *trajectory.response_token_ids.tolist()]


async def test_what_agents_see_is_what_the_trainer_gets(tiny_dense: Path) -> None:
    config = config_of(tiny_dense)
    seen: dict[str, list[int]] = {}

    async def work(url: str) -> None:
        for number in range(4 * GROUPS):
            name = f"s{number}"
            seen[name] = await converse(url, name, turns=1 + number % 4)
            await told(url, name, reward=float(number), log=name)

    async with (
        running(config) as handle,
        front(FrontOptions(handle.address, handle.tokens[Role.ENVIRONMENT], "127.0.0.1:0", model=tiny_dense)) as url,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        steps, _ = await asyncio.gather(train(handle, trainer, steps=4, groups=GROUPS), work(url))
    check_promises(steps, window=2, groups=GROUPS)
    found = [each for step in steps for group in step for each in group.trajectories]
    assert {each.verifier_log: tokens_of(each) for each in found} == seen
    assert all(each.reward == float(each.verifier_log[1:]) and each.reward_valid for each in found)


async def test_rewards_of_turns_add_up_and_what_is_too_long_is_cut(tiny_dense: Path) -> None:
    """A reward is in the trajectory whatever log and components come with it, which are cut to their limits."""
    rewards, log = (0.25, 0.5, 1.0), "\ud83d" + "x" * 100_000

    async def rewarded(url: str, body: dict[str, Any]) -> None:
        async with aiohttp.ClientSession() as http, http.post(f"{url}/sessions/s/reward", json=body) as reply:
            assert reply.status == 200, await reply.text()

    async def work(url: str) -> None:
        await converse(url, "s", turns=3)
        for turn, value in enumerate(rewards):
            await rewarded(url, {"turn": turn, "reward": value})
        await told(url, "s", log=log)

    async with (
        running(config_of(tiny_dense)) as handle,
        front(FrontOptions(handle.address, handle.tokens[Role.ENVIRONMENT], "127.0.0.1:0", model=tiny_dense)) as url,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        (step,), _ = await asyncio.gather(train(handle, trainer, steps=1, groups=1), work(url))
    (found,) = (each for group in step for each in group.trajectories)
    begins = [0, *(event.position_token for event in found.events if event.position_token)]
    assert found.reward_valid and found.reward == sum(rewards)
    assert found.turn_rewards == {str(begin): value for begin, value in zip(begins, rewards, strict=True)}
    assert found.verifier_log == "?" + "x" * (LOG_MAX_BYTES - 1)


async def test_an_agent_does_not_wait_behind_the_queue_of_prompts(tiny_dense: Path) -> None:
    """60 prompts wait, and the trainer takes 12 groups."""

    async def ask(url: str) -> None:
        async with agents(url) as api:
            await api.chat.completions.create(model="policy", messages=[{"role": "user", "content": "abc"}])

    async with (
        running(config_of(tiny_dense)) as handle,
        front(FrontOptions(handle.address, handle.tokens[Role.ENVIRONMENT], "127.0.0.1:0", model=tiny_dense)) as url,
        dora.Prompts(handle.address, handle.token) as prompts,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        await prompts.submit([{"text": "ab", "prompt_id": f"p{number}", "group_size": 1} for number in range(60)])
        steps, _ = await asyncio.gather(train(handle, trainer, steps=4, groups=GROUPS), ask(url))
    found = [group.prompt_id for step in steps for group in step]
    assert [each for each in found if not each.startswith("p")], found


async def test_a_full_window_says_what_it_waits_for(tiny_dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sessions that nobody ends fill the window. The next call is told so, and so are operators, who are advised to
    add no workers; a call that is wrong in itself does not wait.
    """
    monkeypatch.setattr("dora.agents.front.service.ADMIT_S", 1.0)
    ask: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 4}

    async def asked(url: str, session: str, **fields: Any) -> tuple[int, str]:
        path = f"{url}/sessions/{session}/v1/chat/completions"
        async with aiohttp.ClientSession() as http, http.post(path, json={**ask, **fields}) as reply:
            return reply.status, await reply.text()

    async def take(trainer: dora.Trainer) -> list[str]:
        async for step in trainer.steps(groups=1):
            return [group.prompt_id async for group in step]
        return []

    async with (
        running(config_of(tiny_dense)) as handle,
        front(FrontOptions(handle.address, handle.tokens[Role.ENVIRONMENT], "127.0.0.1:0", model=tiny_dense)) as url,
        dora.Trainer(handle.address, token=handle.token) as trainer,
        Operator(handle.address, handle.token) as operator,
    ):
        taking = asyncio.create_task(take(trainer))
        for name in ("held", "other"):
            assert (await asked(url, name))[0] == 200
        status = await until(operator, lambda status: status.window_wait.sessions_idle == 2)
        wait = status.window_wait
        assert (wait.waits_for, wait.environment) == ("agents", "open:held")
        assert 0 < time.time() - wait.since < 60
        named = (wait.session_id, f"group {wait.group_id}", "opened as held", clock_time(wait.since))
        code, said = await asked(url, "late")
        assert code == 429 and all(each in said for each in named), said
        assert status.dp_groups_to_add == 0 and "more workers would not help" in pace(status)
        lines = {name: text for name, text, _ in head_of(status)}
        assert all(each in lines["waits for"] for each in named)
        console = Console(width=200)
        with console.capture() as captured:
            console.print(status_table(status))
        assert all(each in " ".join(captured.get().split()) for each in named[:3])
        for wrong, code in (({"max_tokens": 10_000}, 400), ({"model": "another"}, 404), ({"top_p": 7}, 400)):
            assert (await asked(url, "late", **wrong))[0] == code
        await told(url, "held", reward=1.0)
        assert await taking == ["held"]
        status = await until(operator, lambda status: status.window_wait.waits_for == "trainer")
        assert f"step {status.newest_version}" in status.window_wait.reason


async def test_choices_branches_and_single_turns(tiny_dense: Path) -> None:
    async def work(url: str) -> list[int]:
        async with agents(url) as api:
            reply = await api.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "abc"}], n=3
            )
            assert len(reply.choices) == 3
        first = await converse(url, "s", turns=2)
        async with agents(url, "s") as api:
            await api.chat.completions.create(model="policy", messages=[{"role": "user", "content": "z"}], max_tokens=4)
        await told(url, "s", reward=0.5)
        return first

    async with (
        running(config_of(tiny_dense)) as handle,
        front(FrontOptions(handle.address, handle.tokens[Role.ENVIRONMENT], "127.0.0.1:0", model=tiny_dense)) as url,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        (step, *_), first = await asyncio.gather(train(handle, trainer, steps=1, groups=2), work(url))
    single, session = sorted(step, key=lambda group: len(group.trajectories), reverse=True)
    assert len(single.trajectories) == 3 and all(each.reward_valid for each in single.trajectories)
    assert [each.reward for each in session.trajectories] == [0.5, 0.5]
    assert tokens_of(session.trajectories[0]) == first


async def listed(metrics: str, url: str) -> None:
    """Returns once Prometheus discovers the front of this URL."""
    async with aiohttp.ClientSession() as http:
        while True:
            async with http.get(f"http://{metrics}/sd") as reply:
                fronts = [each["targets"] for each in await reply.json() if each["labels"]["role"] == "front"]
            if [url.removeprefix("http://")] in fronts:
                return


async def test_a_front_that_dies_is_started_again(tiny_dense: Path) -> None:
    """Agents keep their address and their sessions: a request that comes meanwhile only waits."""

    async def work(metrics: str, process: FrontProcess) -> None:
        await listed(metrics, process.url)
        first = await converse(process.url, "s", turns=2)
        (child,) = [each for each in descendants() if "front" in psutil.Process(each).cmdline()]
        os.kill(child, signal.SIGKILL)
        async with aiohttp.ClientSession() as http:
            asked = {"token_ids": [*first, 5], "sampling_params": {"max_tokens": 3}}
            async with http.post(f"{process.url}/sessions/s/inference/v1/generate", json=asked) as reply:
                seen.extend([*first, 5, *(await reply.json())["choices"][0]["token_ids"]])
            async with http.get(f"{process.url}/v1/models") as reply:
                assert json.loads(await reply.text())["data"][0]["max_model_len"] == 256
        await told(process.url, "s", reward=1.0)

    seen: list[int] = []
    config = config_of(tiny_dense, service__metrics="127.0.0.1:0")
    async with running(config) as handle, dora.Trainer(handle.address, token=handle.token) as trainer:
        process = FrontProcess("127.0.0.1:0")
        process.start(handle.address, handle.tokens[Role.ENVIRONMENT], handle.model)
        try:
            (step, *_), _ = await asyncio.gather(
                train(handle, trainer, steps=1, groups=1), work(handle.metrics, process)
            )
        finally:
            await process.stop()
    assert [tokens_of(each) for group in step for each in group.trajectories] == [seen]


async def test_the_agent_of_the_documentation(tiny_dense: Path) -> None:
    async with (
        running(config_of(tiny_dense)) as handle,
        front(FrontOptions(handle.address, handle.tokens[Role.ENVIRONMENT], "127.0.0.1:0", model=tiny_dense)) as url,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        code = snippet("docs/agents.md", "from openai import OpenAI").replace("http://127.0.0.1:8000", url)
        (step, *_), _ = await asyncio.gather(
            train(handle, trainer, steps=1, groups=1), asyncio.to_thread(exec, code, {})
        )
    ((trajectory,),) = [group.trajectories for group in step]
    assert (trajectory.reward, len(trajectory.events), trajectory.branch_index) == (1.0, 2, 0)


@pytest.mark.full
async def test_a_front_without_a_model_waits_for_its_service(
    tiny_dense: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It tells so once, and serves once the service is there; after its time it ends."""
    service = Killed(tmp_path, settings_of(tiny_dense, tmp_path, kv__pool_mb=0))
    await service.start()  # for its address and token
    await service.kill()
    options = FrontOptions(service.address, service.token, "127.0.0.1:0", service_wait_s=0.1)
    with refused(ServiceUnavailable):
        async with front(options):
            raise AssertionError
    caplog.clear()
    serving = front(replace(options, service_wait_s=60.0))
    starting = asyncio.create_task(serving.__aenter__())
    try:
        while not caplog.records:
            await asyncio.wait([starting], timeout=0.01)
        await service.start()
        async with aiohttp.ClientSession() as http, http.get(f"{await starting}/health") as reply:
            assert reply.status == 200
        (told,) = [each for each in caplog.records if each.name == "dora.front"]
        assert service.address in told.getMessage()
        await serving.__aexit__(None, None, None)
    finally:
        await service.stop()


async def test_a_front_that_dies_leaves_its_opened_sessions_to_the_next(tiny_dense: Path) -> None:
    """By id and key, also after a restart of the service; an unknown one is refused and opens nothing."""

    async def work(handle: Any, options: FrontOptions) -> None:
        async with front(options) as url, aiohttp.ClientSession() as http:
            body = {"group": "g", "size": 2, "sampling": {"max_tokens": 4}}
            async with http.post(f"{url}/sessions", json=body) as reply:
                opened = (await reply.json())["sessions"]
            seen[0] = await converse(url, opened[0]["id"], turns=2)
        async with front(options) as url, aiohttp.ClientSession() as http:
            asked = {"token_ids": [*seen[0], 5], "sampling_params": {"max_tokens": 3}}
            for each, given in zip(opened, (asked, {"token_ids": [5, 6]}), strict=True):
                own = {"Authorization": f"Bearer {each['key']}"}
                async with http.post(f"{url}/inference/v1/generate", json=given, headers=own) as reply:
                    assert reply.status == 200, await reply.text()
                    tokens = (await reply.json())["choices"][0]["token_ids"]
                seen[opened.index(each)] = [*given["token_ids"], *tokens]  # type: ignore[misc]
            for name in ("g0.0", f"{opened[0]['id']}x", "g77.0"):
                async with http.post(f"{url}/sessions/{name}/inference/v1/generate", json=asked) as reply:
                    assert reply.status == 404, name
            for number, each in enumerate(opened):
                await told(url, each["id"], reward=float(number))

    seen: dict[int, list[int]] = {}
    async with running(config_of(tiny_dense)) as handle, dora.Trainer(handle.address, token=handle.token) as trainer:
        options = FrontOptions(handle.address, handle.tokens[Role.ENVIRONMENT], "127.0.0.1:0", model=tiny_dense)
        (step, *_), _ = await asyncio.gather(train(handle, trainer, steps=1, groups=1), work(handle, options))
    ((first, second),) = [group.trajectories for group in step]
    assert [tokens_of(first), tokens_of(second)] == [seen[0], seen[1]]
    assert [first.reward, second.reward] == [0.0, 1.0]


@pytest.mark.full
async def test_a_burst_below_the_fronts_limit_is_answered(tiny_dense: Path) -> None:
    """450 calls at once, each a session of its own: no connection's limit is an agent's matter."""
    calls = 450
    config = config_of(tiny_dense, sessions__open_max=2 * calls)

    async def burst(url: str) -> list[int]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http:

            async def ask() -> int:
                body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 1}}
                async with http.post(f"{url}/inference/v1/generate", json=body) as reply:
                    await reply.read()
                    return reply.status

            return list(await asyncio.gather(*(ask() for _ in range(calls))))

    async with (
        running(config) as handle,
        front(FrontOptions(handle.address, handle.tokens[Role.ENVIRONMENT], "127.0.0.1:0", model=tiny_dense)) as url,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        await trainer.attach(groups=calls)
        assert {*await burst(url)} == {200}


async def test_a_context_without_room_is_named_as_harnesses_expect(tiny_dense: Path) -> None:
    async with (
        running(config_of(tiny_dense)) as handle,
        front(FrontOptions(handle.address, handle.tokens[Role.ENVIRONMENT], "127.0.0.1:0", model=tiny_dense)) as url,
        dora.Trainer(handle.address, token=handle.token) as trainer,
        aiohttp.ClientSession() as http,
    ):
        await trainer.attach(groups=1)

        async def ask(tokens: int, most: int | None) -> tuple[int, dict[str, Any]]:
            body = {"token_ids": [5] * tokens, "sampling_params": {} if most is None else {"max_tokens": most}}
            async with http.post(f"{url}/sessions/s{tokens}/inference/v1/generate", json=body) as reply:
                return reply.status, await reply.json()

        assert (await ask(250, 5))[0] == 200
        for tokens, most in ((250, 7), (255, 2), (256, None), (257, 1), (5000, None)):
            status, found = await ask(tokens, most)
            assert status == 400 and found["error"]["code"] == "context_length_exceeded", found
            assert "-" not in found["error"]["message"].partition("must be")[2].replace("max-", "")
