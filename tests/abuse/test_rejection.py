"""A trainer publishes what no worker can reproduce: nobody is killed, the trainer is told and publishes it anew."""

import asyncio
import math
import os
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

import dora
from dora.client import Operator, session
from dora.client.step import Step
from dora.core import commands as do
from dora.core import events as on
from dora.data.trajectory import TrajectoryGroup
from dora.data.types import Canary
from dora.errors import Conflict, InvalidValue, VersionRejected
from dora.ops.cli.app import app
from dora.orchestrator.main import ServiceHandle
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from tests.private_token import with_token
from tests.refusals import refused
from tests.service import check_promises, configured, during, running, until
from tests.unit.test_runtime import Shell, ended

GROUPS = 4
WRONG = Canary((3, 4, 5), (-1.0, -2.0))

Weights = dict[str, np.ndarray]


@pytest.fixture
def tensors(tiny_dense: Path) -> Weights:
    found: Weights = load_file(tiny_dense / "model.safetensors")
    return found


@dataclass
class Loop:
    """A trainer's loop. ``bad``: versions that it publishes with other weights and a wrong canary; ``times`` each."""

    trainer: dora.Trainer
    weights: Weights
    bad: dict[int, int] = field(default_factory=dict)
    steps: list[list[TrajectoryGroup]] = field(default_factory=list)
    told: list[VersionRejected] = field(default_factory=list)
    committed: asyncio.Event = field(default_factory=asyncio.Event)  # a bad version was
    proceed: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, steps: int) -> None:
        async for step in self.trainer.steps(groups=GROUPS):
            await self._train(step)
            if len(self.steps) == steps:
                break

    async def _train(self, step: Step) -> None:
        groups: list[TrajectoryGroup] = []
        while not step.committed:
            try:
                async for group in step:
                    groups.append(group)
                weights, canary = self._published(step.number + 1)
                await step.commit(weights=weights, canary=canary, wait=True)
                if canary is WRONG:
                    self.committed.set()
                    await self.proceed.wait()
            except VersionRejected as rejected:
                self.told.append(rejected)
                weights, canary = self._published(rejected.version)
                await self.trainer.republish(weights, version=rejected.version, canary=canary)
        self.steps.append(groups)

    def _published(self, version: int) -> tuple[Weights, Canary | None]:
        if not self.bad.get(version):
            return self.weights, None
        self.bad[version] -= 1
        return {name: tensor * 2 for name, tensor in self.weights.items()}, WRONG


def rejected_versions(status: pb.Status) -> list[int]:
    return [version.version for version in status.versions if version.state == "rejected"]


def printed(handle: ServiceHandle, command: str) -> str:
    result = CliRunner(env={"COLUMNS": "500"}).invoke(
        app, [command, "--address", handle.address, "--token-file", with_token(handle.token)]
    )
    return " ".join(result.stdout.split())


@pytest.mark.parametrize("uploads", [False, pytest.param(True, marks=pytest.mark.full)])
async def test_what_no_worker_reproduces_is_rejected_and_published_anew(
    uploads: bool, tiny_dense: Path, tensors: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two commits with a wrong canary in a window of 2, the first of them mended by a second wrong one."""
    if uploads:
        monkeypatch.setattr(session, "_shares_host", lambda reply: False)
    record, log = tmp_path / "record", tmp_path / "state"
    config = configured(
        tiny_dense,
        workers__engine="fake",
        workers__count=2,
        record=str(record),
        service__state=str(log),
        service__keep_events=True,
    )
    async with (
        running(config) as handle,
        Operator(handle.address, handle.token) as operator,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        loop = Loop(trainer, tensors, bad={1: 2, 2: 1})
        work = asyncio.create_task(loop.run(6))
        await during(work, loop.committed.wait())
        status = await during(work, until(operator, rejected_versions))
        assert rejected_versions(status) == [1] and status.counters["versions_rejected"] == 1
        for command in ("status", "versions"):
            shown = await asyncio.to_thread(printed, handle, command)
            assert "rejected" in shown and "logprobs differ from the canary by" in shown
        loop.proceed.set()
        await work
        status = await operator.status()
    assert [(each.version, each.worker_ids) for each in loop.told[:2]] == [(1, ("w0", "w1"))] * 2
    assert all(each.version in (1, 2) and 1e-3 < each.canary_difference < math.inf for each in loop.told)
    counters = status.counters
    assert counters["workers_lost"] == counters["groups_lost"] == counters["c1_violations"] == 0
    assert counters["versions_rejected"] == len(loop.told) and counters["groups_cancelled"] == 0
    check_promises(loop.steps, window=2, groups=GROUPS)
    for kept in (record / "versions").iterdir():
        content = load_file(kept / "model.safetensors")
        assert all(np.array_equal(content[name], tensors[name]) for name in tensors), "the record has what was mended"
    replayed = CliRunner().invoke(app, ["replay", str(log), "--only", "RejectVersion,VersionRepublished"])
    assert replayed.exit_code == 0 and replayed.stdout.count("VersionRepublished") >= len(loop.told)


@pytest.mark.parametrize("window", [pytest.param(1, marks=pytest.mark.full), 3])
async def test_every_step_of_a_window_may_be_rejected(window: int, tiny_dense: Path, tensors: Weights) -> None:
    """And one more: in a window of 1 nobody has anything to do meanwhile, in a wider one older versions go on."""
    config = configured(tiny_dense, workers__engine="fake", workers__count=2, window__size=window)
    async with (
        running(config) as handle,
        Operator(handle.address, handle.token) as operator,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        loop = Loop(trainer, tensors, bad=dict.fromkeys(range(1, window + 2), 1))
        loop.proceed.set()
        await loop.run(window + 4)
        counters = (await operator.status()).counters
    if window == 1:  # else a version may be over before a worker has come to it
        assert [each.version for each in loop.told] == [1, 2]
    assert counters["workers_lost"] == counters["groups_lost"] == 0
    assert counters["versions_rejected"] == len(loop.told)
    check_promises(loop.steps, window=window, groups=GROUPS)


async def test_who_attaches_to_a_rejected_version_is_told_and_may_mend_it(tiny_dense: Path, tensors: Weights) -> None:
    """The trainer that published it has gone; the only worker's word is enough; its groups are delivered again."""
    config = configured(tiny_dense, workers__engine="fake", workers__count=1)
    async with running(config) as handle, Operator(handle.address, handle.token) as operator:
        async with dora.Trainer(handle.address, token=handle.token) as first:
            async for step in first.steps(groups=GROUPS):
                taken = [[group async for group in step]]
                await step.commit(weights=tensors, canary=WRONG, wait=True)
                break
        await until(operator, rejected_versions)
        async with dora.Trainer(handle.address, token=handle.token) as second:
            async for step in second.steps():
                with refused(VersionRejected, field="version", value=1, names=("w0",)):
                    await anext(step)
                with refused(Conflict, field="version", value="2", names=("1",)):
                    await second.republish(tensors, version=2)
                await second.republish(tensors, version=1)
                taken.append([group async for group in step])
                await step.commit(weights=tensors, wait=True)
                break
        status = await operator.status()
    assert status.counters["workers_lost"] == 0
    check_promises(taken, window=2, groups=GROUPS)


# ------------------------------------------------------------------------------------------- the shell, call by call


@pytest.fixture
async def shell(tmp_path: Path, tiny_dense: Path) -> AsyncIterator[Shell]:
    made = Shell(tmp_path, tiny_dense, None)
    yield made
    await made.runtime.close()


def load_of_version_1(shell: Shell) -> int:
    """The command by which the worker is told to load it; it has loaded whatever it was told to load before."""
    while True:
        pending = shell.state.pending.items()
        found = {number: each.command.version for number, each in pending if isinstance(each.command, do.LoadVersion)}
        ((number, version),) = found.items()
        if version == 1:
            return number
        shell.runtime.reports.outcome(shell.session, pb.WorkerOutcome(command_id=number, ok=True))


def refuse(shell: Shell) -> None:
    refusal = pb.WorkerOutcome(error="differs", error_kind="weights", canary_difference=math.inf)
    refusal.command_id = load_of_version_1(shell)
    shell.runtime.reports.outcome(shell.session, refusal)


async def publish(shell: Shell) -> None:
    """Version 1 is committed, and the only worker empty."""
    (request_id,) = await shell.admit(1)
    stream = shell.trainer.StreamStep(pb.StreamStepRequest(trainer_epoch=1, step=0), None)
    shell.report(ended(request_id))
    async for _ in stream:
        pass
    await shell.trainer.CommitStep(shell.commit_request(), None)
    shell.runtime.core.post(on.RebalanceRequested())


def republish_request(shell: Shell, canary: Canary | None = None) -> pb.RepublishVersionRequest:
    files = shell.commit_request().files
    wire = convert.canary_to_wire(canary) if canary is not None else None
    return pb.RepublishVersionRequest(trainer_epoch=1, version=1, files=files, canary=wire)


async def test_a_repeated_republish_is_recognised(shell: Shell) -> None:
    await publish(shell)
    refuse(shell)
    request = republish_request(shell)
    for _ in range(2):  # the first reply was lost
        reply = await shell.trainer.RepublishVersion(request, None)
        assert reply.next_step == 1 and not shell.state.rejected
    with refused(Conflict, field="version", value=1):
        await shell.trainer.RepublishVersion(republish_request(shell, WRONG), None)
    refuse(shell)
    with refused(
        InvalidValue,
        field="model.safetensors: blake3",
        value="a6ab482c7170fda443f69e79205197580f30320da16aa728e4a4daa06ce0b630",
    ):  # a bad one changes nothing
        bad = republish_request(shell)
        bad.files[0].blake3 = bytes(32)
        await shell.trainer.RepublishVersion(bad, None)
    assert 1 in shell.state.rejected and shell.store.folder(1).is_dir()
    await shell.trainer.RepublishVersion(republish_request(shell, WRONG), None)
    assert not shell.state.rejected and shell.store.canary(1) == WRONG
    assert not shell.kills.killed


async def test_a_commit_that_a_rejection_overtakes_leaves_nothing(shell: Shell) -> None:
    """Else other weights could never be committed in its place: what is published stays as it is."""
    await publish(shell)
    shell.state.window.step += 1  # as if the next step were full
    request = shell.commit_request()
    os.rename(shell.store.begin(1, 1), shell.store.begin(1, 2))
    request.step, request.version = 1, 2
    shell.store.gate = threading.Event()
    commit = asyncio.create_task(shell.trainer.CommitStep(request, None))
    await shell.until(lambda: shell.store.waiting)
    refuse(shell)
    shell.store.gate.set()
    with pytest.raises(VersionRejected):
        await commit
    assert 2 not in shell.store.versions()


async def test_a_canary_of_a_load_that_no_longer_counts_is_not_kept(shell: Shell) -> None:
    await publish(shell)
    number = load_of_version_1(shell)
    shell.state.workers["w0"].load_is_void = True
    outcome = pb.WorkerOutcome(command_id=number, ok=True, canary=convert.canary_to_wire(WRONG))
    shell.runtime.reports.outcome(shell.session, outcome)
    assert shell.store.canary(1) is None


async def test_a_worker_that_hangs_in_a_load_is_replaced_by_the_loads_own_limit(shell: Shell) -> None:
    """Whatever its silence limit: till then its version and every later one would be kept."""
    await publish(shell)
    load_of_version_1(shell)
    shell.session.heard_s -= 3600.0
    shell.runtime.sessions.replace_silent(60.0, {"w0"})
    assert not shell.kills.killed, "a worker that loads says nothing"
    shell.state.workers["w0"].load_began_s -= shell.runtime.config.workers.load_timeout_s
    shell.runtime.core.post(on.Tick())
    assert shell.kills.killed == ["w0"]
    assert "not loaded in 60 s" in shell.runtime.sessions.lost_reasons["w0"]
