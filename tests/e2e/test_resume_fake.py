"""The state on disk is, at every moment, the one that the core of the living service would keep."""

import asyncio
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dora
from dora.client import Operator
from dora.core import Machine
from dora.core import events as on
from dora.core.rules.restoring import durable
from dora.journal.finding import find
from dora.orchestrator import starting
from dora.orchestrator.recovery import resume
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.orchestrator.runtime import Runtime
from tests.e2e.test_service_fake import GROUPS, LONG
from tests.service import configured, during, move_one, running


@pytest.fixture
def runtimes(monkeypatch: pytest.MonkeyPatch) -> list[Runtime]:
    """The runtime of each service that this test starts."""
    started: list[Runtime] = []

    class Kept(Runtime):
        def __init__(self, *arguments: Any, **fields: Any) -> None:
            super().__init__(*arguments, **fields)
            started.append(self)

    monkeypatch.setattr(starting, "Runtime", Kept)
    return started


async def test_what_is_on_disk_is_what_the_core_knows(
    tiny_dense: Path, tmp_path: Path, runtimes: list[Runtime]
) -> None:
    config = configured(tiny_dense, window__size=2, service__state=str(tmp_path / "state"), **LONG)
    seen: list[on.Restored] = []
    async with (
        running(config) as handle,
        Operator(handle.address, handle.token) as operator,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        (runtime,) = runtimes
        finished = asyncio.Event()  # a group waits for a step: one that is looked at
        moved = asyncio.Event()
        training = asyncio.create_task(train(trainer, handle.model, finished, moved))
        moving = asyncio.create_task(during(training, move_one(operator)))
        moving.add_done_callback(lambda _: moved.set())
        while not training.done():
            await runtime.journal.settled()
            log = runtime.journal.log
            assert log is not None
            if log.durable == log.appended:  # and nothing happens meanwhile
                seen.append(check(runtime, tmp_path / "state", tmp_path / f"copy{len(seen)}"))
                if seen[-1].leased and seen[-1].finished:
                    finished.set()
            await asyncio.wait({training}, timeout=0.05)
        await moving
        await training
    assert len(seen) >= 5 and max(each.newest for each in seen) >= 2


async def train(trainer: dora.Trainer, model: Path, finished: asyncio.Event, moved: asyncio.Event) -> None:
    """Four steps, or more until a request has moved, each committed once groups of a later one are seen to wait."""
    async for step in trainer.steps(groups=GROUPS):
        _ = [group async for group in step]
        await finished.wait()
        await step.commit(weights=model)
        if step.number >= 3 and moved.is_set():
            return
        finished.clear()


def check(runtime: Runtime, state: Path, copy: Path) -> on.Restored:
    """Compares the core, and the buffer, with what a service would begin with that starts now."""
    expected = durable(runtime.core.machine.state)
    shutil.copytree(state / "log", copy / "log")
    found = find(copy)
    assert found.said == [] and found.requests.damaged == []
    buffer = ResponseBuffer(runtime.config.rollout, None, runtime.config.window.least)
    groups = found.groups
    leased = resume.restore_buffer(buffer, groups, found.requests, found.durable.next_number)
    told = resume.restored(buffer, found, groups, runtime.config.window, time.time(), runtime.incarnation.number)
    machine = Machine(runtime.config)
    machine.handle(told, time.monotonic())
    assert comparable(durable(machine.state)) == comparable(expected)
    assert [each.group_id for each in leased] == list(expected.leased)
    for group in leased:
        (delivered,) = [each for each in runtime.buffer.leased() if each.group_id == group.group_id]
        for ours, theirs in zip(group.trajectories, delivered.trajectories, strict=True):
            assert ours.to_json_dict() == theirs.to_json_dict()
    for name, entries in buffer.groups():
        others = dict(runtime.buffer.groups())[name]
        for ours, theirs in zip(entries, others, strict=True):
            assert ours.delivered == theirs.delivered and ours.segment_starts == theirs.segment_starts
            assert (ours.row, ours.sampling, ours.number) == (theirs.row, theirs.sampling, theirs.number)
    shutil.rmtree(copy)
    return told


def comparable(restored: on.Restored) -> on.Restored:
    """Without what is not kept to the last, and ids that go on behind those that may be lost."""
    groups = tuple(
        replace(each, age_s=0.0, prompt=replace(each.prompt, prompt_id="", priority=0)) for each in restored.groups
    )
    requests = replace(restored.requests, tokens=np.array(restored.requests.tokens))
    return replace(
        restored,
        groups=groups,
        requests=requests,
        counters={},
        learnt="",
        groups_named=0,
        commands_sent=0,
        left_behind=0,
    )
