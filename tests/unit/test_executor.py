"""The executor alone: every kind of command reaches the part that carries it out, and an outcome is one event."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest

from dora.config import RolloutConfig
from dora.core import commands as do
from dora.core import events as on
from dora.core.handoff.table import Handoff
from dora.data.run_record import CANCELLED_FILE, TRAJECTORIES_FILE, Recorder
from dora.data.token_spans import TokenSpan
from dora.data.types import Canary, EngineCapability, KvEndpoint, Prompt, Reward
from dora.errors import NotFound
from dora.orchestrator.executor import Executor
from dora.orchestrator.recording.storage import Storage
from dora.orchestrator.rollout.environments import Environments
from dora.orchestrator.rollout.evaluations import Evaluations
from dora.orchestrator.rollout.groups import Groups
from dora.orchestrator.rollout.history import FleetHistory
from dora.orchestrator.rollout.journal import Journal
from dora.orchestrator.rollout.prompt_ledger import PromptLedger, PromptState
from dora.orchestrator.rollout.prompts import Prompts
from dora.orchestrator.rollout.record_queue import RecordQueue
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.orchestrator.rollout.responses.state import TOKEN
from dora.orchestrator.rollout.streams import MemberSessions, StepStream, WorkerSession
from dora.orchestrator.rollout.telemetry import Telemetry
from dora.orchestrator.rollout.trainers import Trainers
from dora.orchestrator.rollout.verdicts import Verdicts
from dora.orchestrator.rollout.versions import Versions
from dora.orchestrator.rollout.workers import Workers
from dora.prompts.traits import features_of, key_of
from dora.rpc.columns import columns_from_wire, columns_to_wire
from tests.part_core import PartCore
from tests.turn_orders import order

CAPABILITY = EngineCapability("f", 8, 4096, 32, 256, 64, "float32")
PROMPT = Prompt("p0", "task", (1, 2), group_size=2, verifier_json='{"reward": 0.5}')


class Feed:
    def __init__(self, ledger: PromptLedger) -> None:
        self.ledger = ledger

    async def take(self, count: int) -> tuple[list[Prompt], bool]:
        prompts = [PROMPT][:count]
        for position, prompt in enumerate(prompts):
            self.ledger.read(position, prompt)
        return prompts, False


class Verifier:
    async def score(
        self, _prompt: str, _response: str | None, _ids: tuple[int, ...], verifier_json: str, name: str
    ) -> Reward:
        return Reward(json.loads(verifier_json)["reward"])


class Store:
    def __init__(self) -> None:
        self.retired: list[int] = []

    def set_aside(self, version: int) -> Path:
        return Path(str(version))

    def free(self, gone: Path) -> None:
        self.retired.append(int(gone.name))


class Hosts:
    def __init__(self) -> None:
        self.retired_versions: list[int] = []
        self.looked: list[int] = []
        self.beside = "w0"

    def name(self, version: int) -> str:
        return f"v{version}-of-the-hosts"

    def canary(self, _version: int) -> Canary | None:
        return None

    def retired(self, version: int) -> None:
        self.retired_versions.append(version)

    def shares_store(self, worker_id: str) -> bool:
        return worker_id == self.beside

    def look_at_store(self, version: int) -> None:
        self.looked.append(version)


class Processes:
    def __init__(self) -> None:
        self.killed: list[str] = []
        self.left: list[str] = []

    def kill(self, worker_id: str) -> None:
        self.killed.append(worker_id)

    def release(self, worker_id: str) -> None:
        self.left.append(worker_id)


class Parts:
    """An executor, one worker "w0" of epoch 1, and the trainer's stream of step 0."""

    def __init__(self, folder: Path | None = None) -> None:
        self.buffer = ResponseBuffer(RolloutConfig())
        self.prompts = PromptLedger(Journal(), queued_most=0)
        self.store, self.processes, self.hosts = Store(), Processes(), Hosts()
        self.core = PartCore({"g0.0": 0, "g0.1": 1})
        self.lost: list[str] = []
        self.sessions = MemberSessions(lambda session, _: self.lost.append(session.worker_id), self.processes)
        self.session = self.sessions.workers["w0"] = WorkerSession("w0", 1, 7, "host", CAPABILITY)
        self.storage = Storage()
        self.recorder = RecordQueue(None if folder is None else Recorder(folder), self.storage, self.core.spawn)
        core, buffer, journal, environments = (
            self.core,
            self.buffer,
            Journal(),
            Environments(self.buffer, self.core.state),
        )
        self.evaluations = Evaluations(core, buffer, environments)
        self.trainers = Trainers(core, buffer, journal, self.recorder)
        self.stream = self.trainers.stream = StepStream(1, 0)
        self.executor = Executor()
        for part in (
            Prompts(core, Feed(self.prompts), buffer),
            Groups(core, buffer, self.prompts, journal, self.recorder, environments, self.evaluations),
            Verdicts(core, buffer, journal, Telemetry(), environments, Verifier(), None),
            self.evaluations,
            self.trainers,
            Versions(core, self.store, None, self.storage, journal, self.hosts, RolloutConfig()),
            Workers(core, buffer, self.sessions, self.hosts, FleetHistory(buffer, self.sessions, 0)),
        ):
            self.executor.register(part.handlers)

    def hand_off(self, command_id: int, handoff: Handoff) -> None:
        """``command_id``: of the command that belongs to it."""
        self.core.state.pending[command_id] = SimpleNamespace(handoff=handoff)

    async def carry_out(self, *commands: do.Command) -> list[on.Event]:
        """The events that came of it, once nothing waits any more."""
        for command in commands:
            self.executor.carry_out(command)
        await asyncio.gather(*self.core.tasks)
        posted, self.core.posted[:] = list(self.core.posted), []
        return posted

    async def admit(self) -> None:
        await self.carry_out(do.DrawPrompts(1))
        await self.carry_out(do.AdmitGroup("g0", "p0", 0, ("g0.0", "g0.1")))

    async def finish(self) -> None:
        await self.admit()
        for row, request_id in enumerate(("g0.0", "g0.1")):
            columns = columns_from_wire(columns_to_wire([TokenSpan(row, 0, (3, 2), (-0.5, -0.25), "stop")]))
            self.buffer.accept("w0", 0, columns, 1.0)
            await self.carry_out(do.ScoreRequest(request_id))

    async def orders(self) -> list[Any]:
        """Returns the commands to the worker, up to the end of its stream."""
        self.session.finish()
        return [command async for command in self.session.commands()]


async def test_drawn_prompts_are_offered_and_become_entries_once_admitted() -> None:
    parts = Parts()
    most = RolloutConfig().max_tokens
    offered = on.OfferedPrompt("p0", "task", 2, 2, most, key_of(PROMPT), features_of(PROMPT))
    assert await parts.carry_out(do.DrawPrompts(1)) == [on.PromptsOffered((offered,), False)]
    assert await parts.carry_out(do.AdmitGroup("g0", "p0", 3, ("g0.0", "g0.1"))) == []
    assert [parts.buffer[f"g0.{index}"].version for index in range(2)] == [3, 3]


def test_each_command_has_one_handler() -> None:
    parts = Parts()
    assert parts.executor._handler_of.keys() == set(get_args(do.Command))
    with pytest.raises(AssertionError):
        parts.executor.register(parts.evaluations.handlers)


async def test_a_response_is_scored() -> None:
    parts = Parts()
    await parts.admit()
    assert await parts.carry_out(do.ScoreRequest("g0.1")) == [on.RequestScored("g0.1", 0.5, True)]
    assert parts.buffer["g0.1"].reward == Reward(0.5)


async def test_a_delivered_group_reaches_the_stream_and_the_record(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    await parts.finish()
    again = do.DeliverGroup("g0", step=0, trainer_epoch=1, again=True)
    await parts.carry_out(do.DeliverGroup("g0", step=0, trainer_epoch=1), again, do.CloseStep(0, 1))
    taken = [group.group_id async for batch in parts.stream.batches() for group in batch]
    assert taken == ["g0", "g0"] and parts.trainers.stream is None
    assert len((tmp_path / TRAJECTORIES_FILE).read_text().splitlines()) == 2, "each response is recorded once"


async def test_what_is_for_an_earlier_stream_reaches_no_other() -> None:
    parts = Parts()
    await parts.finish()
    await parts.carry_out(do.DeliverGroup("g0", step=0, trainer_epoch=0), do.CloseStep(1, 1))
    assert parts.trainers.stream is parts.stream
    parts.stream.close()
    assert [batch async for batch in parts.stream.batches()] == []


@pytest.mark.parametrize("command", [do.DropGroup("g0", "asked for"), do.ForgetGroup("g0")], ids=["drop", "forget"])
async def test_a_group_that_ends_leaves_the_book_and_frees_its_prompt(command: do.Command, tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    await parts.admit()
    await parts.carry_out(command)
    assert parts.buffer.get("g0.0") is None and parts.prompts.state("p0") is PromptState.DONE
    reasons = [json.loads(line)["reason"] for line in (tmp_path / CANCELLED_FILE).read_text().splitlines()]
    assert reasons == (["asked for"] if isinstance(command, do.DropGroup) else [])


@pytest.mark.parametrize("recorded", [False, True])
async def test_a_retired_version_leaves_the_store(recorded: bool, tmp_path: Path) -> None:
    parts = Parts(tmp_path if recorded else None)
    await parts.carry_out(do.RetireVersion(4), do.ReleaseSnapshot("there"))
    assert parts.store.retired == parts.hosts.retired_versions == [4]


async def test_workers_get_their_commands_as_messages() -> None:
    parts = Parts()
    await parts.admit()
    commands = [
        do.LoadVersion("w0", 1, 0, 2),
        do.StartRequest("w0", 1, 1, "g0.0", 0, "new"),
        do.ReserveSlot("w0", 1, 2, "g0.0", 0, 8),
        do.CopyOut("w0", 1, 3, "g0.0"),
        do.CopyIn("w0", 1, 4, "g0.0", 0, "there"),
        do.RemoveRequest("w0", 1, 5, "g0.0"),
        do.CancelReservation("w0", 1, 6, "g0.0"),
        do.Thaw("w0", 1, 7, "g0.0"),
        do.Park("w0", 1, 8, "g0.0"),
        do.Resume("w0", 1, 9, "g0.0"),
        do.ExtendRequest("w0", 1, 10, "g0.0"),
    ]
    entry = parts.buffer["g0.0"]
    entry.finish_reason = "stop"
    parts.buffer.give(order(entry, [5, 6], 9, "tool"), 0.0)
    assert {type(command) for command in commands} == {
        kind for kind in get_args(do.Command) if issubclass(kind, do.WorkerCommand)
    }
    await parts.carry_out(*commands, do.Thaw("w0", 2, 11, "g0.0"), do.Thaw("w1", 1, 12, "g0.0"))
    orders = await parts.orders()
    assert [order.command_id for order in orders] == list(range(11)), "none of another epoch or worker"
    assert orders[0].load_version.name == "v2-of-the-hosts" and orders[4].copy_in.locator == "there"
    assert [order.copy_out.request_id for order in orders[8:10]] == ["g0.0", "g0.0"]
    extend = orders[10].extend_request
    assert (np.frombuffer(extend.given_token_ids, "<i4").tolist(), extend.sampling.max_tokens, extend.first_token) == (
        [5, 6],
        9,
        0,
    )
    assert orders[2].reserve_slot.source_epoch == 0 and orders[3].copy_out.target.address == "", "of no handoff"


async def test_a_fork_says_what_its_worker_drops() -> None:
    parts = Parts()
    await parts.admit()
    entry = parts.buffer["g0.0"]
    entry.delivered += np.zeros(4, TOKEN).tobytes()
    entry.finish_reason = "stop"
    parts.buffer.give(order(entry, [5, 6], 9, "tool", (0, 1)), 0.0)
    await parts.carry_out(do.ExtendRequest("w0", 1, 0, "g0.0"))
    (sent,) = await parts.orders()
    assert (sent.extend_request.first_token, sent.extend_request.dropped_tokens) == (1, 3)


async def test_the_ends_of_a_handoff_are_told_of_each_other() -> None:
    parts = Parts()
    parts.sessions.workers["w1"] = WorkerSession("w1", 5, 8, "host", CAPABILITY, KvEndpoint("host:9", ("tcp",)))
    parts.hand_off(2, Handoff(row=0, request_id="g0.0", source="w1", target="w0", began_s=0.0))
    parts.hand_off(3, Handoff(row=0, request_id="g0.0", source="w0", target="w1", began_s=0.0))
    parts.hand_off(4, Handoff(row=0, request_id="g0.0", source="w0", target="w2", began_s=0.0))  # w2 has just died
    commands = [
        do.ReserveSlot("w0", 1, 2, "g0.0", 0, 8),
        do.CopyOut("w0", 1, 3, "g0.0"),
        do.CopyOut("w0", 1, 4, "g0.0"),
    ]
    await parts.carry_out(*commands)
    reserve, copy_out, alone = await parts.orders()
    assert reserve.reserve_slot.source_epoch == 5
    target = copy_out.copy_out.target
    assert (target.worker_id, target.epoch, target.address, list(target.transports)) == ("w1", 5, "host:9", ["tcp"])
    assert alone.copy_out.target.address == ""


async def test_an_evicted_worker_is_killed_and_a_drained_one_leaves() -> None:
    parts = Parts()
    await parts.carry_out(do.EvictWorker("w0", 2, "another epoch"))
    assert not parts.processes.killed
    await parts.carry_out(do.StopWorker("w0", 1))
    assert [order.WhichOneof("kind") for order in await parts.orders()] == ["shutdown"]
    assert parts.processes.left == ["w0"] and not parts.lost
    await parts.carry_out(do.EvictWorker("w0", 1, "a wrong version"))
    assert parts.processes.killed == parts.lost == ["w0"] and not parts.sessions.workers


async def test_a_handoff_that_took_too_long_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """A stopped worker sends no reason, so no line has one; a worker's refusal is in its outcome."""
    parts = Parts()
    parts.hand_off(6, Handoff(0, "g0.0", "w1", "w0", 0.0, overdue="it took longer than 30 s"))
    parts.hand_off(7, Handoff(0, "g0.1", "w1", "w0", 0.0))
    await parts.carry_out(do.CancelReservation("w0", 1, 6, "g0.0"), do.CancelReservation("w0", 1, 7, "g0.1"))
    assert [record.getMessage() for record in caplog.records] == [
        "g0.0: its handoff from w1 to w0 was undone: it took longer than 30 s"
    ]


@pytest.mark.parametrize(
    ("error", "beside", "kind"),
    [
        (NotFound("version", 4, "one of those held"), "w0", "missing"),
        (FileNotFoundError("versions"), "w0", "missing"),
        (NotFound("version", 4, "one of those held"), "", "refused"),
    ],
)
async def test_a_version_of_which_nobody_knows_the_name_is_a_load_that_fails(
    error: Exception, beside: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's host with a store of its own may have the version: it is not missing there."""
    parts = Parts()
    parts.hosts.beside = beside

    def name(_version: int) -> str:
        raise error

    monkeypatch.setattr(parts.hosts, "name", name)
    (done,) = await parts.carry_out(do.LoadVersion("w0", 1, 9, 4))
    assert isinstance(done, on.CommandDone)
    assert (done.command_id, done.ok, done.error_kind) == (9, False, kind)
    assert parts.hosts.looked == [4]
