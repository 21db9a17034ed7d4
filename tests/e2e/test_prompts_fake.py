"""A service's prompts, with fake engines: epochs, stops, priorities, cancelling, and the end."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tokenizers import Tokenizer

import dora
from dora.client import Operator
from dora.config import Config
from dora.data.run_record import CANCELLED_FILE
from dora.data.trajectory import TrajectoryGroup
from dora.data.types import Prompt
from dora.errors import Conflict, InvalidValue
from dora.ops.view.live import service_view
from dora.ops.view.narration import news, sign_of_progress
from dora.ops.view.service import drain_rows
from dora.orchestrator.main import ServiceHandle
from dora.rpc.dora_pb2 import Status
from tests.refusals import refused
from tests.service import check_promises, configured, running, until

GROUPS = 4
REWARD = "dora.rewards.tiny:score"


def config_of(model: Path, **fields: Any) -> Config:
    fake = {"workers__engine": "fake", "prompts": "none", "reward__function": REWARD, "rollout__group_size": 2}
    return configured(model, **{**fake, **fields})


async def train_to_the_end(handle: ServiceHandle, groups: int = GROUPS) -> list[list[TrajectoryGroup]]:
    taken = []
    async with dora.Trainer(handle.address, token=handle.token) as trainer:
        async for step in trainer.steps(groups=groups):
            taken.append([group async for group in step])
            await step.commit(weights=handle.model, wait=True)
    return taken


async def test_a_file_is_gone_through_in_epochs_of_their_own_order(
    tiny_dense: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(json.dumps({"text": f"{number}+1", "answer": number}) + "\n" for number in range(5)))
    source = {"prompts__source": str(file), "prompts__epochs": 2, "prompts__shuffle": True}
    async with running(config_of(tiny_dense, **source)) as handle:
        steps = await train_to_the_end(handle)
        async with Operator(handle.address, handle.token) as operator:
            status = await operator.status()
        assert not await train_to_the_end(handle), "a trainer that comes again is told why"
    (said,) = [record.getMessage() for record in caplog.records if record.name == "dora.client"]
    for told in (said, dict(drain_rows(status))["ended"], sign_of_progress(status)):
        assert f"the prompts of {file} have ended" in told
    assert "prompts.epochs" in said and "prompts.epochs" in status.drain.remedy and not status.drain.waits_for
    assert len(news(Status(), status)) > len(news(status, status)) == 0
    assert [len(step) for step in steps] == [4, 4, 2]
    names = [group.prompt_id for step in steps for group in step]
    assert sorted(names) == sorted([f"sums:{n}" for n in range(1, 6)] + [f"sums:{n}#1" for n in range(1, 6)])
    assert (status.source_epoch, status.source_index) == (2, 0)


async def test_a_service_that_drains_says_what_it_waits_for(tiny_dense: Path, tmp_path: Path) -> None:
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(json.dumps({"text": f"{number}+1", "answer": number}) + "\n" for number in range(4)))
    async with (
        running(config_of(tiny_dense, prompts__source=str(file))) as handle,
        Operator(handle.address, handle.token) as operator,
    ):
        async with dora.Trainer(handle.address, token=handle.token) as trainer:
            step = await anext(trainer.steps(groups=GROUPS))
            assert len([group async for group in step]) == GROUPS
            taken = await until(operator, lambda status: status.draining)
            assert taken.drain.waits_for == f"{GROUPS} groups to be committed by the trainer"
        left = await until(operator, lambda status: not status.trainer)
        assert left.drain.waits_for.endswith("a trainer, as none is attached")
        assert await train_to_the_end(handle)
        done = await operator.status()
        assert done.draining and not done.drain.waits_for
        shown = "".join(segment.text for segment in Console(width=160).render(service_view(done, "it")))
        assert "waits for: nothing" in shown


async def test_a_service_waits_for_clients_after_its_file_until_they_say_that_no_more_will_come(
    tiny_dense: Path, tmp_path: Path
) -> None:
    file = tmp_path / "few.jsonl"
    file.write_text('{"text": "a"}\n{"text": "b"}\n')
    config = config_of(tiny_dense, prompts__source=str(file), prompts__then="wait")
    async with running(config) as handle, dora.Prompts(handle.address, handle.token) as prompts:
        training = asyncio.create_task(train_to_the_end(handle))
        async with Operator(handle.address, handle.token) as operator:
            await until(operator, lambda status: status.counters["groups_admitted"] == 2)
            await prompts.submit(["c", "d"])
            await until(operator, lambda status: status.counters["groups_trained"] == GROUPS)
        await prompts.submit([Prompt("last", "", (1, 2))])
        assert await prompts.end() in (0, 1)
        steps = await training
        assert await prompts.end() == 0
        with refused(Conflict, field="prompts", value=1):
            await prompts.submit(["e"])
    assert [len(step) for step in steps] == [GROUPS, 1]
    assert steps[1][0].prompt_id == "last"


async def test_the_highest_priority_goes_first_and_nothing_else_changes(tiny_dense: Path) -> None:
    config = config_of(tiny_dense, window__size=2)
    order = {"low": -5, "first": 0, "second": 0, "high": 7, "third": 0, "higher": 8, "fourth": 0, "fifth": 0}
    async with running(config) as handle, dora.Prompts(handle.address, handle.token) as prompts:
        await prompts.submit([{"text": "ab", "prompt_id": name, "priority": each} for name, each in order.items()])
        with refused(InvalidValue, field="priority", value=1001, names=("-1000", "1000")):
            await prompts.submit([{"text": "ab", "priority": 1001}])
        await prompts.end()
        steps = await train_to_the_end(handle)
    check_promises(steps, window=2, groups=GROUPS)
    groups = {group.group_id: group.prompt_id for step in steps for group in step}
    admitted = [groups[f"g{number}"] for number in range(len(order))]
    assert admitted == ["higher", "high", "first", "second", "third", "fourth", "fifth", "low"]


async def test_what_is_cancelled_is_queued_or_admitted_and_never_taken(tiny_dense: Path, tmp_path: Path) -> None:
    config = config_of(tiny_dense, record=str(tmp_path), rollout__ignore_eos=True)
    async with (
        running(config) as handle,
        dora.Prompts(handle.address, handle.token) as prompts,
        Operator(handle.address, handle.token) as operator,
    ):

        async def cancel(*names: str, reason: str = "") -> list[tuple[str, str]]:
            return [(each.state, each.group_id) for each in await prompts.cancel(names, reason)]

        await prompts.submit([Prompt(f"p{number}", "", (1, 2)) for number in range(14)])
        assert await cancel("p0", "p0", "nobody") == [("dequeued", ""), ("before", ""), ("unknown", "")]
        assert (await operator.status()).prompts_queued == 13
        await prompts.submit([Prompt("p0", "", (1, 2))])  # an id that was cancelled is free again
        async with dora.Trainer(handle.address, token=handle.token) as trainer:
            steps = trainer.steps(groups=GROUPS)
            step = await anext(steps)
            await until(operator, lambda status: status.counters["groups_admitted"] == 2 * GROUPS)
            assert await cancel("p0") == [("dequeued", "")]  # of the core's backlog
            first = await anext(step)
            await until(operator, lambda status: status.filling_step == 1)  # no more of them is taken before the commit
            open_groups = {
                row.group_id: row.prompt_id
                for row in (await operator.trajectories(limit=100)).trajectories
                if row.deadline_step == 1 and row.state != "leased"
            }
            assert await cancel(first.prompt_id, first.group_id) == [("taken", first.group_id)] * 2
            (by_group, _), (_, by_prompt), *_ = open_groups.items()
            assert await cancel(by_group, by_prompt, reason="mistyped") == [
                ("cancelled", by_group),
                ("cancelled", next(name for name, prompt in open_groups.items() if prompt == by_prompt)),
            ]
            assert [state for state, _ in await cancel(by_group, by_prompt)] == ["before"] * 2
            with refused(InvalidValue, field="reason", value="two\nlines"):
                await prompts.cancel(["p1"], "two\nlines")
            with refused(InvalidValue, names=("4096",)):
                await prompts.cancel(["p1"] * 5000)
            await prompts.end()
            taken = [first.prompt_id, *[group.prompt_id async for group in step]]
            await step.commit(weights=handle.model, wait=True)
            async for step in steps:
                taken += [group.prompt_id async for group in step]
                await step.commit(weights=handle.model, wait=True)
        status = await operator.status()
    lines = [json.loads(line) for line in (tmp_path / CANCELLED_FILE).read_text().splitlines()]
    assert [line["reason"] for line in lines] == ["cancelled on request: mistyped"] * 2
    assert sorted([*taken, *(line["prompt_id"] for line in lines), "p0"]) == sorted(f"p{n}" for n in range(14))
    assert status.counters["prompts_cancelled"] == 2 and status.counters["groups_cancelled"] == 2
    assert status.counters["groups_lost"] == 0


async def test_a_stop_text_ends_a_response_also_where_its_worker_died(tiny_dense: Path, tmp_path: Path) -> None:
    """And it is recorded: what was asked for, and which it was. The trainer gets all that was sampled."""
    letters = "abcdefghijklmnop"
    stops = [f"{letter}{other}" for letter, other in zip(letters, reversed(letters), strict=True)]
    config = config_of(
        tiny_dense,
        record=str(tmp_path),
        rollout__ignore_eos=True,
        rollout__max_tokens=1500,
        rollout__group_size=8,
        workers__max_model_len_tokens=2048,
        workers__kv_tokens=32768,
    )
    async with (
        running(config, processes=True) as handle,
        dora.Prompts(handle.address, handle.token) as prompts,
        Operator(handle.address, handle.token) as operator,
    ):
        asked = [{"text": "ab" * number, "sampling": {"stop": stops}} for number in range(1, 5)]
        await prompts.submit([*asked, {"text": "no", "sampling": {"stop_token_ids": [40, 41], "max_tokens": 900}}])
        await prompts.end()
        training = asyncio.create_task(train_to_the_end(handle))
        status = await until(operator, lambda status: status.counters.get("tokens_generated", 0) > 2000)
        os.kill(next(worker.pid for worker in status.workers if worker.running), signal.SIGKILL)
        steps = await training
        assert (await operator.status()).counters["requests_orphaned"] > 0
    tokenizer = Tokenizer.from_file(str(tiny_dense / "tokenizer.json"))
    ended = {"stop": 0, "length": 0}
    for group in (group for step in steps for group in step):
        for trajectory in group.trajectories:
            ids = trajectory.response_token_ids.tolist()
            ended[trajectory.finish_reason] += 1
            if trajectory.sampling.stop_token_ids:
                assert trajectory.stop_reason == ids[-1] and ids[-1] in (40, 41) and not {40, 41} & set(ids[:-1])
                continue
            assert trajectory.sampling.stop == tuple(stops)
            text, before = (tokenizer.decode(each, skip_special_tokens=False) for each in (ids, ids[:-1]))
            assert not any(stop in before for stop in stops)
            assert [stop for stop in stops if stop in text] == (
                [trajectory.stop_reason] if trajectory.stop_reason else []
            )
    assert ended["stop"] >= 30
    reasons = [json.loads(line)["stop_reason"] for line in (tmp_path / "trajectories.jsonl").read_text().splitlines()]
    assert {type(reason) for reason in reasons} >= {str, int}


async def test_the_context_is_the_models_within_the_cache(tiny_dense: Path) -> None:
    for kv_tokens, context in ((4096, 512), (300, 288)):
        config = config_of(tiny_dense, workers__max_model_len_tokens=0, workers__kv_tokens=kv_tokens, workers__count=1)
        async with running(config) as handle, dora.Prompts(handle.address, handle.token) as prompts:
            await prompts.submit([{"token_ids": [5] * (context - 48)}])
            with refused(InvalidValue, field="tokens", value=context - 47, names=(context - 48, context, 48)):
                await prompts.submit([{"token_ids": [5] * (context - 47)}])
