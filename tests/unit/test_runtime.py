"""The shell around the core, without processes: what happens between a report, a command and a trainer's call."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dora.config import validated
from dora.core import events as on
from dora.data.run_record import CANCELLED_FILE, Recorder
from dora.data.token_spans import TokenSpan
from dora.data.trajectory import Int32Array
from dora.data.types import EngineCapability, Prompt, Reward, TokenDelta
from dora.errors import IllegalTransition, InvalidValue, NotFound
from dora.kvtransfer.transports.segments import SegmentPool
from dora.metrics.distribution import LATENCY_BOUNDS_S
from dora.orchestrator.assembly import services_of
from dora.orchestrator.rollout.feed import PromptFeed
from dora.orchestrator.rollout.responses.state import ReportError
from dora.orchestrator.rollout.streams import LOST_KEPT, WorkerSession
from dora.orchestrator.rollout.telemetry import Telemetry
from dora.orchestrator.runtime import Runtime
from dora.orchestrator.setup import with_context
from dora.rpc import dora_pb2 as pb
from dora.rpc.columns import columns_to_wire
from dora.rpc.roles import ServiceTokens
from dora.weights.files import WeightFile, hash_file
from dora.weights.store import WeightStore
from tests.refusals import refused
from tests.turn_orders import order

SPAN = ("first_token", "token_ids", "logprobs", "finish_reason", "stop", "routed_experts")
CAPABILITY = EngineCapability("f", 8, 4096, 32, 256, 64, "float32")


class Praise:
    """Every response is worth 1.0, or what the prompt's own data says."""

    async def score(
        self, _prompt: str, _response: str | None, _ids: Int32Array, verifier_json: str, name: str
    ) -> Reward:
        verdict = json.loads(verifier_json)
        return Reward(verdict.get("reward", 1.0), valid=verdict.get("valid", True))


class Dismiss:
    """A filter that lets every group go that its gate lets it look at."""

    name = "dismiss"

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.seen: list[list[float]] = []
        self.answered = asyncio.Event()

    async def keeps(self, _prompt: str, rewards: Sequence[float], _verifier_json: str) -> bool:
        self.seen.append(list(rewards))
        await self.gate.wait()
        self.answered.set()
        return False


class Kills:
    """Whom the runtime had killed."""

    def __init__(self) -> None:
        self.killed: list[str] = []

    def kill(self, worker_id: str) -> None:
        self.killed.append(worker_id)

    def release(self, worker_id: str) -> None: ...


class GatedStore(WeightStore):
    """Its ``publish`` waits in its thread until the gate opens."""

    gate: threading.Event | None = None
    waiting = False

    def publish(self, *arguments: Any, **options: Any) -> Path:
        if self.gate is not None:
            self.waiting = True
            assert self.gate.wait(30)
        return super().publish(*arguments, **options)


class Shell:
    """A runtime with one worker, whose part the test plays."""

    def __init__(self, folder: Path, model: Path, group_filter: Dismiss | None) -> None:
        config = validated(
            {
                "prompts": "none",
                "rollout": {"group_size": 1, "max_tokens": 64},
                "workers": {"max_model_len_tokens": 256},
            }
        )
        (folder / "kv").mkdir()
        self.model = model
        self.store = GatedStore(folder / "weights", model)
        self.kills = Kills()
        self.runtime = Runtime(
            config,
            feed=PromptFeed(config, None),
            verifier=Praise(),
            store=self.store,
            snapshots=folder / "kv",
            group_filter=group_filter,
            recorder=Recorder(folder / "record"),
        )
        self.runtime.sessions.processes = self.kills
        self.trainer = services_of(self.runtime, model, folder / "kv", ServiceTokens("")).trainer
        self.session = self.join(1)

    @property
    def state(self) -> Any:
        return self.runtime.core.machine.state

    def join(self, epoch: int) -> WorkerSession:
        session = WorkerSession("w0", epoch, 1, "host", CAPABILITY)
        self.runtime.sessions.workers["w0"] = session
        self.runtime.core.post(on.WorkerJoined("w0", epoch, CAPABILITY.slots, CAPABILITY.kv_tokens))
        self.session = session
        return session

    def orders(self, kind: str) -> list[Any]:
        """The commands of this kind that wait for the worker; all are obeyed."""
        found = []
        while not self.session._outbox.empty():
            command = self.session._outbox.get_nowait()
            if command is None:
                continue
            self.runtime.reports.outcome(self.session, pb.WorkerOutcome(command_id=command.command_id, ok=True))
            if command.WhichOneof("kind") == kind:
                found.append(getattr(command, kind))
        return found

    async def admit(
        self, groups: int, group_size: int = 0, verifier_json: str = "{}", pairs: int = 1, environment: str = ""
    ) -> list[str]:
        """A trainer attaches, prompts come, their requests are started."""
        self.orders("")
        await self.trainer.Attach(pb.AttachRequest(groups_per_step=groups), None)
        prompt = Prompt("", "task", (1, 2) * pairs, environment=environment)
        self.runtime.feed.submit(
            [
                replace(prompt, prompt_id=f"p{i}", group_size=group_size, verifier_json=verifier_json)
                for i in range(groups)
            ]
        )
        await self.until(lambda: len(self.state.group_row) == groups)
        return [start.request_id for start in self.orders("start_request")]

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.to_thread(lambda: None)

    def report(self, *deltas: TokenDelta, version: int = 0) -> None:
        """Raises what the service refuses."""
        spans = [TokenSpan(self.row(each.request_id), *(getattr(each, name) for name in SPAN)) for each in deltas]
        message = pb.WorkerReport(tokens=columns_to_wire(spans), version=version)
        self.runtime.reports.report(self.session, message)

    def row(self, request_id: str) -> int:
        """By which reports name the request; that of none, where there is no such request."""
        row: int = self.state.request_row.get(request_id, self.state.requests.capacity - 1)
        return row

    async def filled(self, trainer_epoch: int = 1) -> pb.CommitStepRequest:
        """A step of one group is streamed to its end; the request to commit it."""
        (request_id,) = await self.admit(1)
        stream = self.trainer.StreamStep(pb.StreamStepRequest(trainer_epoch=trainer_epoch, step=0), None)
        self.report(ended(request_id))
        async for _ in stream:
            pass
        return self.commit_request()

    def commit_request(self) -> pb.CommitStepRequest:
        file = self.store.begin(1, 1) / "model.safetensors"
        file.write_bytes((self.model / "model.safetensors").read_bytes())
        found: WeightFile = hash_file(file)
        announced = pb.WeightFile(name=file.name, file_bytes=found.file_bytes, blake3=found.blake3)
        return pb.CommitStepRequest(trainer_epoch=1, step=0, version=1, files=[announced])


@pytest.fixture
async def shell(tmp_path: Path, tiny_dense: Path) -> AsyncIterator[Shell]:
    made = Shell(tmp_path, tiny_dense, None)
    yield made
    await made.runtime.close()


@pytest.fixture
def dismiss() -> Dismiss:
    return Dismiss()


@pytest.fixture
async def filtered(tmp_path: Path, tiny_dense: Path, dismiss: Dismiss) -> AsyncIterator[Shell]:
    """A shell whose filter is ``dismiss``."""
    made = Shell(tmp_path, tiny_dense, dismiss)
    yield made
    await made.runtime.close()


def ended(request_id: str, version: int = 0, first: int = 0) -> TokenDelta:
    return TokenDelta(request_id, version, first, (3, 2), (-0.5, -0.25), "stop")


async def test_nothing_of_a_report_with_a_bad_delta_counts(shell: Shell) -> None:
    """A worker that is wrong about one request is believed about none; all of them run again elsewhere."""
    good, bad = await shell.admit(2)
    with refused(ReportError, field="first token", value=5):
        shell.report(ended(good), ended(bad, first=5))
    assert not len(shell.runtime.buffer[good])
    shell.runtime.sessions.replace(shell.session, "a gap")
    await shell.until(lambda: not shell.state.workers)
    shell.join(2)
    assert {start.request_id for start in shell.orders("start_request")} == {good, bad}


async def test_tokens_of_another_version_are_counted_and_never_taken(shell: Shell) -> None:
    (request_id,) = await shell.admit(1)
    shell.report(ended(request_id, version=3), version=3)
    assert shell.runtime.core.machine.counters.c1_violations == 1
    assert not len(shell.runtime.buffer[request_id])
    assert shell.kills.killed == ["w0"]


async def test_a_worker_is_lost_at_once_and_its_late_reports_are_ignored(shell: Shell) -> None:
    """Its stream may hang for ever, as that of a stopped process does: nothing waits for it."""
    (request_id,) = await shell.admit(1)
    old = shell.session
    shell.runtime.sessions.replace(old, "silent")
    assert not shell.runtime.sessions.workers and shell.kills.killed == ["w0"]
    await shell.until(lambda: not shell.state.workers)
    shell.join(2)
    shell.orders("")
    shell.session, new = old, shell.session
    shell.report(ended(request_id))
    shell.runtime.sessions.lose(old, "its connection broke")  # the old stream ends at last
    shell.runtime.sessions.replace(old, "its last words were wrong")
    await shell.until(lambda: True)
    assert shell.runtime.sessions.workers == {"w0": new} and list(shell.state.workers) == ["w0"]
    assert shell.kills.killed == ["w0"], "the new process lives"
    assert not len(shell.runtime.buffer[request_id])


async def test_a_commit_goes_on_when_its_caller_hangs_up(shell: Shell) -> None:
    """Else version 1 would lie in the store, uncommitted, and the next trainer's version 1 be refused for ever."""
    (request_id,) = await shell.admit(1)
    stream = shell.trainer.StreamStep(pb.StreamStepRequest(trainer_epoch=1, step=0), None)
    shell.report(ended(request_id))
    async for _ in stream:
        pass
    shell.store.gate = threading.Event()
    call = asyncio.ensure_future(shell.trainer.CommitStep(shell.commit_request(), None))
    await shell.until(lambda: shell.trainer._changing.locked())
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    attaching = asyncio.ensure_future(shell.trainer.Attach(pb.AttachRequest(), None))
    await shell.until(lambda: True)
    assert not attaching.done(), "attached between a version's storing and its commit"
    shell.store.gate.set()
    assert (await attaching).next_step == 1
    assert shell.store.versions() == (0, 1)


async def test_a_bug_in_the_midst_of_an_event_ends_the_service(shell: Shell) -> None:
    failed = shell.runtime.core.failed
    await shell.admit(2)
    with pytest.raises(IllegalTransition):  # the core admits what the shell has never drawn
        shell.runtime.core.post(on.PromptsOffered((on.OfferedPrompt("p9", "task", 2, 1, 64),)))
    assert isinstance(failed.exception(), IllegalTransition)


async def test_what_the_core_refuses_is_no_bug(shell: Shell) -> None:
    failed = shell.runtime.core.failed
    with refused(NotFound, field="worker_id", value="nobody"):
        shell.runtime.core.post(on.DrainRequested("nobody"))
    assert not failed.done()


def test_contexts_longer_than_the_model_takes_are_refused_before_an_engine_starts(tiny_dense: Path) -> None:
    for most, too_long in ((512, False), (513, True)):
        config = validated({"model": "tiny", "workers": {"max_model_len_tokens": most}})
        with refused(InvalidValue, names=("512",)) if too_long else nullcontext():
            assert with_context(config, tiny_dense) == config


@pytest.mark.parametrize(
    ("said", "kv_tokens", "expected"),
    [
        ({"max_position_embeddings": 512}, 4096, 512),
        ({"max_position_embeddings": 1 << 20}, 32768, 32768),
        ({"max_position_embeddings": 1 << 20}, 1000, 992),  # whole blocks of 32
        ({"n_positions": 1024}, 4096, 1024),
        ({"max_position_embeddings": 4096, "model_max_length": 1024}, 8192, 1024),
        ({"max_position_embeddings": 64, "text_config": {"max_position_embeddings": 700}}, 4096, 700),
        ({}, 32768, 2048),
        ({}, 320, 320),
    ],
)
def test_a_context_that_is_not_given_is_the_models_within_the_cache(
    said: dict[str, Any], kv_tokens: int, expected: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(said))
    config = validated({"rollout": {"max_tokens": 48}, "workers": {"kv_tokens": kv_tokens}})
    assert with_context(config, tmp_path).workers.max_model_len_tokens == expected
    given = validated({"rollout": {"max_tokens": 48}, "workers": {"kv_tokens": kv_tokens, "max_model_len_tokens": 100}})
    assert with_context(given, tmp_path) == given


def test_a_context_that_leaves_no_room_for_a_prompt_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 200}')
    with refused(InvalidValue, field="rollout.max_tokens", value=256, names=("max_model_len_tokens", "200")):
        with_context(validated({}), tmp_path)


async def test_shared_memory_that_a_dead_worker_left_is_swept(shell: Shell, tmp_path: Path) -> None:
    living = SegmentPool(tmp_path / "kv", "1", 1 << 20)
    dead = tmp_path / "kv" / "9"
    dead.mkdir()
    (dead / "owner.lock").touch()  # nobody holds it
    (dead / f"{'0' * 32}.kv").touch()
    (tmp_path / "kv" / "another's").mkdir()
    shell.runtime.sweep_snapshots()
    assert {left.name for left in (tmp_path / "kv").iterdir()} == {"1", "another's"}
    living.close()
    assert {left.name for left in (tmp_path / "kv").iterdir()} == {"another's"}


@pytest.mark.parametrize("waited_s", [float("nan"), float("inf"), -1.0])
async def test_a_commit_that_waited_for_no_time_there_is_is_refused(shell: Shell, waited_s: float) -> None:
    request = await shell.filled()
    request.waited_s = waited_s
    with refused(InvalidValue, names=("waited_s", "0")):
        await shell.trainer.CommitStep(request, None)
    request.waited_s = 1.0
    assert (await shell.trainer.CommitStep(request, None)).next_step == 1


async def test_siblings_differ_where_their_prompt_names_a_seed(shell: Shell) -> None:
    prompt = Prompt("p0", "task", (1, 2), sampling={"seed": 7}, group_size=3)
    shell.runtime.buffer.admit("g0", prompt, 0, {"g0.0": 0, "g0.1": 1, "g0.2": 2}, 0.0)
    seeds = [shell.runtime.buffer[f"g0.{index}"].sampling.seed for index in range(3)]
    assert seeds[0] == 7 and len(set(seeds)) == 3
    shell.runtime.buffer.admit("g1", replace(prompt, prompt_id="p1"), 0, {"g1.0": 3, "g1.1": 4, "g1.2": 5}, 0.0)
    assert seeds == [shell.runtime.buffer[f"g1.{index}"].sampling.seed for index in range(3)], (
        "they follow from it alone"
    )


async def test_the_reasons_of_lost_workers_are_kept_for_the_last_ones(shell: Shell) -> None:
    for number in range(LOST_KEPT + 3):
        shell.runtime.sessions.keep_reason(f"w{number}", "drained")
    assert len(shell.runtime.sessions.lost_reasons) == LOST_KEPT and "w2" not in shell.runtime.sessions.lost_reasons


@pytest.mark.parametrize("is_asked", [False, True])
async def test_a_settled_turn_is_the_one_that_its_worker_has_last(shell: Shell, is_asked: bool) -> None:
    """A worker that has begun the next turn would take it for the settled one, and forget what it may need to tell."""
    runtime = shell.runtime
    runtime.incarnation.orphan_timeout_s = 60.0
    (request_id,) = await shell.admit(1, environment="tool")
    shell.report(ended(request_id))
    if is_asked:
        asked = order(runtime.buffer[request_id], [5], 9, "tool")
        runtime.core.post(asked.event, lambda: runtime.buffer.give(asked, 0.0))
    runtime.durable_ends.settle()
    assert [list(each.request_ids) for each in shell.orders("settled")] == [[request_id]] * (not is_asked)


async def test_a_filtered_group_is_cancelled_recorded_and_never_seen_by_a_step(
    filtered: Shell, dismiss: Dismiss, tmp_path: Path
) -> None:
    dismiss.gate.set()
    first, second = await filtered.admit(1, group_size=2, verifier_json='{"reward": 0.5}')
    stream = filtered.trainer.StreamStep(pb.StreamStepRequest(trainer_epoch=1, step=0), None)
    filtered.report(ended(first))
    await filtered.until(lambda: filtered.runtime.telemetry.trajectories_finished == 1)
    assert not dismiss.seen and filtered.state.group_row, "one verdict is due"
    filtered.report(ended(second))
    await filtered.until(lambda: not filtered.state.group_row)
    assert dismiss.seen == [[0.5, 0.5]]
    assert filtered.runtime.telemetry.groups_filtered == filtered.runtime.core.machine.counters.groups_cancelled == 1
    await filtered.runtime.recorder.written()
    (line,) = (tmp_path / "record" / CANCELLED_FILE).read_text().splitlines()
    recorded = json.loads(line)
    assert recorded.pop("cancelled_at") > 0
    assert recorded == {
        "group_id": "g0",
        "prompt_id": "p0",
        "task_id": "task",
        "version": 0,
        "reason": "filtered: dismiss",
        "length_tokens": [2, 2],
        "rewards": [0.5, 0.5],
    }
    filtered.runtime.feed.submit([Prompt("p0", "task", (1, 2))])  # its prompt may come again
    await stream.aclose()


async def test_a_group_with_a_failed_verdict_is_not_filtered(filtered: Shell, dismiss: Dismiss) -> None:
    (request_id,) = await filtered.admit(1, verifier_json='{"valid": false}')
    stream = filtered.trainer.StreamStep(pb.StreamStepRequest(trainer_epoch=1, step=0), None)
    filtered.report(ended(request_id))
    taken = [group.group_id async for batch in stream for group in batch.groups]
    assert taken == ["g0"] and not dismiss.seen


async def test_a_group_that_is_cancelled_while_the_filter_looks_is_cancelled_once(
    filtered: Shell, dismiss: Dismiss
) -> None:
    (request_id,) = await filtered.admit(1)
    filtered.report(ended(request_id))
    await filtered.until(lambda: dismiss.seen)
    filtered.runtime.core.post(on.GroupCancelled("g0", "asked for"))
    dismiss.gate.set()
    await dismiss.answered.wait()
    await asyncio.to_thread(lambda: None)  # what a task that failed leaves is seen by now
    assert filtered.runtime.core.machine.counters.groups_cancelled == 1
    assert not filtered.runtime.telemetry.groups_filtered and not filtered.runtime.core.failed.done()


@pytest.mark.parametrize(("waited_s", "expected"), [((30.0, 30.0), 2), ((0.0, 0.0), 0), ((None, None), None)])
def test_the_trainers_waiting_says_how_many_dp_groups_to_add(
    waited_s: tuple[float | None, ...], expected: int | None
) -> None:
    """Steps of 60 s on two DP groups of which it waits 30: four would generate one in the 30 s that it trains."""
    telemetry = Telemetry()
    telemetry.step(0, [], {}, at=100.0, stepped_s=7.0, waited_s=90.0)
    assert telemetry.groups_to_add(2) is None, "what the first step took is not known"
    for step, waited in enumerate(waited_s, start=1):
        # the wall clock was set back meanwhile
        telemetry.step(step, [], {}, at=50.0 - step, stepped_s=7.0 + 60.0 * step, waited_s=waited)
    assert telemetry.groups_to_add(2) == expected


def test_time_in_a_pool_is_counted_apart_from_blackouts() -> None:
    telemetry = Telemetry()
    found = telemetry.counters()
    assert found["blackout_ms_p99"] == found["parked_ms_p99"] == 0.0
    for arrival, without_token_ms in (("migrated", 10.0), ("parked", 5000.0), ("re-prefilled", 70.0), (None, 80.0)):
        telemetry.arrived(arrival, without_token_ms)  # type: ignore[arg-type]
    found = telemetry.counters()
    for name, expected_ms in (("blackout_ms", 10.0), ("parked_ms", 5000.0)):
        assert found[f"{name}_p50"] == pytest.approx(expected_ms, rel=0.2)
        assert found[f"{name}_p99"] == pytest.approx(expected_ms, rel=0.2)


def test_quantiles_of_buckets_are_near_those_of_the_values() -> None:
    telemetry, values_ms = Telemetry(), np.random.default_rng(1).lognormal(4.0, 2.0, 5000)
    for value_ms in values_ms:
        telemetry.arrived("migrated", float(value_ms))
    found = telemetry.counters()
    assert found["blackout_ms_p50"] == pytest.approx(np.percentile(values_ms, 50), rel=0.05)
    assert found["blackout_ms_p99"] == pytest.approx(np.percentile(values_ms, 99), rel=0.1)
    telemetry.arrived("parked", 1e9)
    assert telemetry.counters()["parked_ms_p50"] == 1000 * LATENCY_BOUNDS_S[-1]


def test_each_service_has_a_registry_of_its_own() -> None:
    telemetry, other = Telemetry(), Telemetry()
    telemetry.arrived("migrated", 10.0)
    assert telemetry.registry.get_sample_value("dora_blackout_seconds_count") == 1
    assert other.registry.get_sample_value("dora_blackout_seconds_count") == 0
