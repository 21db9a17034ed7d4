"""Weights, or the whole run folder, vanish under a living service: it says so, asks for them, and goes on."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from shutil import rmtree

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import dora
from dora.client import Operator
from dora.core import commands as do
from dora.core import events as on
from dora.data.types import Canary
from dora.errors import Conflict, VersionRejected
from dora.host.processes import Processes
from dora.orchestrator.hosts import weight_distributor
from dora.orchestrator.hosts.remote import HostSession
from dora.orchestrator.rollout.streams import WorkerSession
from dora.release import __version__
from dora.rpc import dora_pb2 as pb
from dora.rpc.convert import canary_to_wire
from dora.rpc.errors import ServiceUnavailable
from dora.rpc.roles import ServiceTokens
from dora.weights.files import hash_file
from tests.refusals import refused
from tests.service import check_promises, configured, running, until
from tests.unit.test_runtime import CAPABILITY, Shell, ended

GROUPS = 4
CANARY = Canary((1, 2, 3), (-0.5, -0.25))


@pytest.mark.timeout(300)
async def test_a_version_whose_weights_vanish_is_published_anew(
    tiny_dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the very weights, as responses were sampled under it."""
    monkeypatch.setattr(weight_distributor, "REMIND_S", 0.0)
    tensors = load_file(tiny_dense / "model.safetensors")
    other = {name: np.float32(2) * tensor for name, tensor in tensors.items()}
    config = configured(tiny_dense, workers__engine="fake", workers__count=2)
    async with (
        running(config) as handle,
        Operator(handle.address, handle.token) as operator,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        steps, told = [], []
        async for step in trainer.steps(groups=GROUPS):
            taken = []
            if step.number == 1:
                await until(operator, lambda status: all(worker.version == 1 for worker in status.workers))
                rmtree(handle.run_folder / "weights" / "versions" / "1")
                status = await until(operator, lambda status: _of(status, 1).state == "rejected")
                assert _of(status, 1).reason == "no host has its weights"
            while not step.committed:
                try:
                    async for group in step:
                        taken.append(group)
                    await step.commit(weights=tensors, wait=True)
                except VersionRejected as rejected:
                    told.append(rejected)
                    with refused(Conflict, field="version", value="v1-52a31bcf7a041641da36f471ceecba86"):
                        await trainer.republish(other, version=rejected.version)
                    await trainer.republish(tensors, version=rejected.version)
            steps.append(taken)
            if len(steps) == 4:
                break
        counters = (await operator.status()).counters
    assert [(each.version, each.worker_ids) for each in told] == [(1, ())]
    assert counters["groups_lost"] == counters["c1_violations"] == counters["workers_lost"] == 0
    check_promises(steps, window=2, groups=GROUPS)


async def test_weights_that_vanish_before_anybody_has_loaded_them_end_nothing(tiny_dense: Path) -> None:
    """The loss is found by a worker, by the order to load, or by the periodic check, whichever is first."""
    config = configured(tiny_dense, workers__engine="fake", workers__count=2, window__size=1)
    async with (
        running(config) as handle,
        Operator(handle.address, handle.token) as operator,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        steps = []
        async for step in trainer.steps(groups=GROUPS):
            taken = []
            while not step.committed:
                try:
                    async for group in step:
                        taken.append(group)
                    await step.commit(weights=handle.model, wait=True)
                    if step.number == 1:
                        rmtree(handle.run_folder / "weights" / "versions" / "2")
                except VersionRejected as rejected:
                    await trainer.republish(handle.model, version=rejected.version)
            steps.append(taken)
            if len(steps) == 4:
                break
        counters = (await operator.status()).counters
    assert counters["groups_lost"] == counters["c1_violations"] == 0
    check_promises(steps, window=1, groups=GROUPS)


def _of(status: pb.Status, version: int) -> pb.VersionStatus:
    return next(each for each in status.versions if each.version == version)


async def test_a_run_folder_that_vanishes_is_a_fault_that_is_shown(tiny_dense: Path, tmp_path: Path) -> None:
    """And that passes, as any other one of the storage does: no status ends the service."""
    config = configured(tiny_dense, workers__engine="fake", workers__count=1, service__run_folder=str(tmp_path / "run"))
    async with (
        running(config) as handle,
        Operator(handle.address, handle.token) as operator,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        aside = handle.run_folder.with_name("aside")
        await asyncio.to_thread(handle.run_folder.rename, aside)
        status = await until(operator, lambda status: status.storage_faults)
        assert [(fault.place, fault.reason) for fault in status.storage_faults] == [
            ("run folder", "No such file or directory")
        ]
        (local,) = (await operator.status()).hosts
        assert local.name == "local" and list(local.versions) == [] and local.capacity.cores > 0
        assert not local.capacity.store_free_bytes
        await asyncio.to_thread(aside.rename, handle.run_folder)
        await until(operator, lambda status: not status.storage_faults)
        steps = []
        async for step in trainer.steps(groups=GROUPS):
            steps.append([group async for group in step])
            await step.commit(weights=handle.model, wait=True)
            if len(steps) == 3:
                break
    check_promises(steps, window=2, groups=GROUPS)


async def test_a_commit_into_a_run_folder_that_has_vanished_is_to_be_repeated(tiny_dense: Path, tmp_path: Path) -> None:
    shell = Shell(tmp_path, tiny_dense, None)
    (request_id,) = await shell.admit(1)
    stream = shell.trainer.StreamStep(pb.StreamStepRequest(trainer_epoch=1, step=0), None)
    shell.report(ended(request_id))
    async for _ in stream:
        pass
    request, aside = shell.commit_request(), tmp_path / "aside"
    shell.store.root.rename(aside)
    with refused(ServiceUnavailable, field="run folder", value=os.strerror(errno.ENOENT)):
        await shell.trainer.CommitStep(request, None)
    assert not shell.runtime.core.failed.done() and shell.state.window.newest == 0
    aside.rename(shell.store.root)
    assert (await shell.trainer.CommitStep(request, None)).next_step == 1
    await shell.runtime.close()


# ------------------------------------------------------------------------------------------- the shell, call by call


class Losing:
    """A shell whose version 1 is published; another host, "h1", may have it too. Then it vanishes here."""

    def __init__(self, shell: Shell, folder: Path) -> None:
        self.shell, self.hosts, self.name = shell, shell.runtime.hosts, ""
        self.hosts.begin(
            Processes(shell.runtime.config.workers, lambda _: [], lambda _: {}, folder), folder, ServiceTokens("")
        )
        self.hosts.open_relay("127.0.0.1")
        shell.runtime.sessions.processes = shell.kills

    async def publish(self) -> None:
        shell = self.shell
        request = await shell.filled()
        request.canary.CopyFrom(canary_to_wire(CANARY))
        await shell.trainer.CommitStep(request, None)
        self.name = shell.store.name(1)

    def join(self, *held: str) -> HostSession:
        """The other host comes, with these versions."""
        capacity = pb.HostCapacity(store_free_bytes=1 << 40)
        session = self.hosts.join(pb.HostHello(name="h1", dora_version=__version__, capacity=capacity), "any")
        self.hosts.ready(session, pb.HostReady(relay_address="127.0.0.1:1", held=held))
        return session

    async def lose(self) -> None:
        rmtree(self.shell.store.folder(1))
        self.hosts.look_at_store(1)
        await self.shell.until(lambda: 1 in self.shell.state.rejected)

    def look(self) -> None:
        """As the service does every few seconds."""
        self.hosts.look(3600.0)

    def weights(self, times: float) -> pb.RepublishVersionRequest:
        """The model's weights, so many times as large; 1: those of version 1."""
        file = self.shell.store.begin(1, 1) / "model.safetensors"
        file.write_bytes((self.shell.model / "model.safetensors").read_bytes())
        if times != 1.0:
            tensors = load_file(file)
            save_file({name: np.float32(times) * tensor for name, tensor in tensors.items()}, file)
        found = hash_file(file)
        announced = pb.WeightFile(name=file.name, file_bytes=found.file_bytes, blake3=found.blake3)
        return pb.RepublishVersionRequest(trainer_epoch=1, version=1, files=[announced])

    async def bring(
        self, times: float, meanwhile: Callable[[], object], fails: bool = False
    ) -> pb.RepublishVersionReply:
        """Publishes version 1 anew; once it is stored, and before it counts, something else happens."""
        trainer, publishing = self.shell.trainer, self.shell.trainer._publishing
        record = publishing.record

        async def after(request: pb.RepublishVersionRequest, folder: Path, identity: bytes) -> None:
            meanwhile()
            if fails:
                raise ServiceUnavailable("the record cannot be written")
            await record(request, folder, identity)

        publishing.record = after  # type: ignore[method-assign]
        try:
            return await trainer.RepublishVersion(self.weights(times), None)
        finally:
            publishing.record = record  # type: ignore[method-assign]


@pytest.fixture
async def losing(tmp_path: Path, tiny_dense: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Losing]:
    monkeypatch.setattr(weight_distributor, "REMIND_S", 0.0)
    made = Losing(Shell(tmp_path, tiny_dense, None), tmp_path)
    await made.publish()
    yield made
    await asyncio.to_thread(made.hosts.close_relay)
    await made.shell.runtime.close()


async def test_the_look_at_the_store_does_not_overtake_what_is_published_anew(losing: Losing) -> None:
    shell = losing.shell
    shell.orders("")
    assert 1 in shell.state.proven
    await losing.lose()
    reply = await losing.bring(1.0, losing.look)
    assert reply.next_step == 1 and not shell.state.rejected and not shell.state.unavailable
    assert shell.store.name(1) == losing.hosts.name_of(1) == losing.name


@pytest.mark.parametrize("times", [1.0, 2.0])
async def test_a_host_that_comes_back_meanwhile_does_not_make_two_of_one_version(losing: Losing, times: float) -> None:
    """Nobody has loaded it yet, so its trainer may bring others: what the host has is then that version no more."""
    shell = losing.shell
    session = losing.join()
    losing.hosts.arrived(session, pb.VersionArrived(name=losing.name))
    losing.hosts.lose(session, "its link broke")
    assert 1 not in shell.state.proven
    await losing.lose()
    await losing.bring(times, lambda: losing.join(losing.name))
    name = shell.store.name(1)
    assert (name == losing.name) == (times == 1.0) and losing.hosts.name_of(1) == name
    assert not shell.state.rejected and not shell.state.unavailable
    assert (1 in shell.state.arrived["h1"]) == (times == 1.0), "what is another version now has to arrive there"
    assert [load.name for load in shell.orders("load_version")][-1] == name
    shell.runtime.core.post(on.WorkerLost("w0", 1, "killed"))
    shell.join(2)
    assert [load.name for load in shell.orders("load_version")] == [name]


async def test_a_host_that_comes_back_with_the_version_ends_a_publication_that_fails(losing: Losing) -> None:
    shell = losing.shell
    session = losing.join()
    losing.hosts.lose(session, "its link broke")
    await losing.lose()
    with pytest.raises(ServiceUnavailable):
        await losing.bring(1.0, lambda: losing.join(losing.name), fails=True)
    assert not shell.state.rejected and not shell.state.unavailable and 1 in shell.state.arrived["h1"]


@pytest.mark.parametrize("times", [1.0, 2.0])
async def test_what_is_brought_after_it_was_found_is_not_needed_and_no_mistake(losing: Losing, times: float) -> None:
    shell, session = losing.shell, losing.join()
    losing.hosts.lose(session, "its link broke")
    await losing.lose()
    losing.join(losing.name)
    assert not shell.state.rejected
    losing.hosts.look(3600.0)
    reply = await shell.trainer.RepublishVersion(losing.weights(times), None)
    assert reply.next_step == 1 and losing.hosts.name_of(1) == losing.name
    assert shell.store.versions() in ((0,), (0, 1))
    with refused(Conflict, field="version", value=0):
        await shell.trainer.RepublishVersion(pb.RepublishVersionRequest(trainer_epoch=1), None)


async def test_what_leaves_the_window_while_it_is_published_anew_leaves_nothing(losing: Losing) -> None:
    shell, state = losing.shell, losing.shell.state
    await losing.lose()

    def leave() -> None:
        """Version 2 was published before; now the last groups of version 1 are cancelled."""
        state.window.newest, state.window.step = 2, 3
        shell.runtime.core.post(on.Tick())

    assert (await losing.bring(1.0, leave)).next_step == 2
    assert 1 not in shell.store.versions() and not state.unavailable and not state.rejected
    assert not shell.runtime.core.failed.done()


async def test_a_worker_of_a_host_that_has_the_version_loads_what_the_service_has_lost(losing: Losing) -> None:
    """The service knows its name and its canary, though its own store has neither any more."""
    shell, runtime = losing.shell, losing.shell.runtime
    losing.hosts.arrived(losing.join(), pb.VersionArrived(name=losing.name))
    rmtree(shell.store.folder(1))
    session = runtime.sessions.workers["far"] = WorkerSession("far", 9, 2, "host", CAPABILITY)
    runtime.core.post(on.WorkerJoined("far", 9, CAPABILITY.slots, CAPABILITY.kv_tokens, "h1"))
    (order,) = [session._outbox.get_nowait() for _ in range(session._outbox.qsize())]
    assert order is not None
    assert order.load_version.name == losing.name and order.load_version.canary == canary_to_wire(CANARY)
    await shell.until(lambda: True)
    assert shell.state.workers["far"].loading == 1 and not shell.state.counters.loads_failed
    runtime.reports.outcome(session, pb.WorkerOutcome(command_id=order.command_id, ok=True))
    assert shell.state.workers["far"].hosts == 1 and not shell.kills.killed


def answer(losing: Losing, kind: str) -> None:
    """The worker's answer to the order to load version 1."""
    shell = losing.shell
    (number,) = [
        number
        for number, pending in shell.state.pending.items()
        if isinstance(pending.command, do.LoadVersion) and pending.command.version == 1
    ]
    outcome = pb.WorkerOutcome(command_id=number, ok=False, error="cannot be loaded", error_kind=kind)
    shell.runtime.reports.outcome(shell.session, outcome)


@pytest.mark.parametrize("kind", ["refused", "weights"])
async def test_a_proven_version_whose_file_is_cut_is_gone_and_no_worker_dies_of_it(losing: Losing, kind: str) -> None:
    """Workers say what they make of it; that they are not at fault is found out before it counts."""
    shell, state = losing.shell, losing.shell.state
    shell.orders("")
    assert 1 in state.proven
    os.truncate(shell.store.folder(1) / "model.safetensors", 1000)
    shell.runtime.core.post(on.WorkerLost("w0", 1, "killed"))
    shell.join(2)
    answer(losing, kind)
    await shell.until(lambda: 1 in state.rejected)
    assert state.unavailable and not shell.kills.killed
    await shell.trainer.RepublishVersion(losing.weights(1.0), None)
    assert [load.name for load in shell.orders("load_version")][-1] == losing.name
    assert state.workers["w0"].hosts == 1 and not shell.kills.killed


async def test_a_worker_that_cannot_load_what_is_sound_is_replaced(losing: Losing) -> None:
    shell, state = losing.shell, losing.shell.state
    shell.orders("")
    shell.runtime.core.post(on.WorkerLost("w0", 1, "killed"))
    shell.join(2)
    for failed in range(1, 4):
        answer(losing, "weights")
        await shell.until(lambda failed=failed: state.counters.loads_failed == failed)
    assert shell.kills.killed == ["w0"] and not state.rejected and not state.missing


@pytest.mark.parametrize("elsewhere", [True, False])
async def test_what_another_hosts_worker_cannot_load_is_got_there_anew(losing: Losing, elsewhere: bool) -> None:
    """Unless nobody else has it: then it may be the worker's fault, and the last copy is kept."""
    shell, runtime = losing.shell, losing.shell.runtime
    shell.orders("")
    session = losing.join()
    losing.hosts.arrived(session, pb.VersionArrived(name=losing.name))
    shell.session = runtime.sessions.workers["far"] = WorkerSession("far", 9, 2, "host", CAPABILITY)
    runtime.core.post(on.WorkerJoined("far", 9, CAPABILITY.slots, CAPABILITY.kv_tokens, "h1"))
    if not elsewhere:
        rmtree(shell.store.folder(1))
        losing.look()
    answer(losing, "weights")
    await shell.until(lambda: shell.state.counters.loads_failed == 1)
    assert (1 in shell.state.arrived["h1"]) != elsewhere and not shell.state.unavailable
    assert (losing.name in {order.drop_version.name for order in orders(session)}) == elsewhere


def orders(session: HostSession) -> list[pb.HostOrder]:
    """The orders that the agent has received."""
    found = [session._outbox.get_nowait() for _ in range(session._outbox.qsize())]
    return [order for order in found if order is not None]
