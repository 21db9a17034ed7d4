"""The whole service with fake engines: processes, gRPC, handoffs, deaths; fast enough to try many things."""

import asyncio
import json
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from safetensors.numpy import load_file

import dora
from dora.client import Operator
from dora.data.run_record import CANCELLED_FILE
from dora.data.types import Prompt
from dora.errors import MISSING, Conflict, InvalidValue, NotFound
from dora.orchestrator.main import ServiceHandle
from dora.orchestrator.services import publishing
from dora.orchestrator.setup import WEIGHTS_FOLDER
from dora.rpc import dora_pb2 as pb
from dora.rpc.errors import LimitExceeded, Unauthenticated
from dora.weights.holds import VERSIONS_FOLDER, held, name_of
from tests.refusals import refused
from tests.service import check_promises, configured, during, move_one, running, train, train_beside, until

GROUPS = 4
# long enough that a version is published while responses of the one before are under way
LONG = {
    "workers__engine": "fake",
    "rollout__ignore_eos": True,
    "rollout__max_tokens": 1500,
    "workers__max_model_len_tokens": 2048,
    "workers__kv_tokens": 16384,
}
TCP, GLOO = (pytest.param("dora", each, marks=pytest.mark.full) for each in ("tcp", "gloo"))


@pytest.mark.parametrize(("policy", "transports"), [("laxity", "shm,tcp"), GLOO, TCP])
async def test_three_steps_two_versions(tiny_dense: Path, policy: str, transports: str) -> None:
    config = configured(tiny_dense, window__size=2, balance__policy=policy, kv__transports=transports, **LONG)
    async with (
        running(config) as handle,
        Operator(handle.address, handle.token) as operator,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        steps = await train_beside(handle, trainer, 4, GROUPS, move_one(operator))
        status = await operator.status()
    check_promises(steps, window=2, groups=GROUPS)
    counters = status.counters
    assert counters["groups_trained"] == len(steps) * GROUPS
    assert counters["groups_lost"] == counters["c1_violations"] == 0
    assert counters["versions_live_max"] == 2
    assert counters["migrations_kv"] > 0 and counters["kv_bytes"] > 0
    assert counters["tokens_reprefilled"] == counters["kv_fallbacks"] == 0


@pytest.mark.parametrize("victim", ["w0", pytest.param("w1", marks=pytest.mark.full)])
async def test_a_killed_worker_costs_no_sample(tiny_dense: Path, victim: str) -> None:
    async with (
        running(configured(tiny_dense, window__size=2, **LONG), processes=True) as handle,
        Operator(handle.address, handle.token) as operator,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        enough = asyncio.Event()
        training = asyncio.create_task(train(handle, trainer, steps=6, groups=GROUPS, enough=enough))
        taken = until(operator, lambda status: status.counters["groups_trained"] >= GROUPS)
        status = await during(training, taken)
        os.kill(next(worker.pid for worker in status.workers if worker.worker_id == victim), signal.SIGKILL)
        await during(training, until(operator, lambda status: status.counters["workers_lost"] >= 1))
        enough.set()
        steps = await training
        status = await operator.status()
    check_promises(steps, window=2, groups=GROUPS)
    assert status.counters["workers_lost"] >= 1
    assert status.counters["groups_lost"] == 0


async def test_a_trainer_that_dies_leaves_its_groups_to_the_next(tiny_dense: Path) -> None:
    async with running(configured(tiny_dense, workers__engine="fake")) as handle:
        async with dora.Trainer(handle.address, token=handle.token) as first:
            async for step in first.steps(groups=GROUPS):
                taken = [(await anext(step)).group_id for _ in range(2)]
                break
        async with dora.Trainer(handle.address, token=handle.token) as second:
            steps = await train(handle, second, steps=2, groups=GROUPS)
        check_promises(steps, window=2, groups=GROUPS)
        assert set(taken) <= {group.group_id for group in steps[0]}
        async with dora.Trainer(handle.address, token=handle.token) as third:
            with refused(Conflict, names=("groups_per_step",)):
                await third.attach(GROUPS + 1)


REWARD = "dora.rewards.tiny:score"


async def test_draining_delivers_what_was_admitted(tiny_dense: Path) -> None:
    """A service that is told to stop gives its trainer all that was admitted, in a short last step, then ends."""
    config = configured(tiny_dense, workers__engine="fake", prompts="none", reward__function=REWARD)
    taken: list[int] = []

    async def train_to_the_end(handle: ServiceHandle) -> None:
        async with dora.Trainer(handle.address, token=handle.token) as trainer:
            async for step in trainer.steps(groups=GROUPS):
                taken.append(len([group async for group in step]))
                await step.commit(weights=handle.model, wait=True)

    async with (
        running(config) as handle,
        dora.Prompts(handle.address, handle.token) as submitter,
        Operator(handle.address, handle.token) as operator,
    ):
        await submitter.submit([Prompt(f"p{i}", "echo", (1, 2, 3)) for i in range(GROUPS + 2)])
        training = asyncio.create_task(train_to_the_end(handle))
        await until(operator, lambda status: status.counters["groups_admitted"] == GROUPS + 2)
    await training
    assert taken == [GROUPS, 2]


async def test_what_a_filter_lets_go_is_recorded_and_no_step_has_it(tiny_dense: Path, tmp_path: Path) -> None:
    """Groups that agree teach nothing and are let go; steps are full all the same."""
    config = configured(
        tiny_dense,
        workers__engine="fake",
        rollout__group_size=2,
        reward__function="tests.unit.reward_functions:agrees_on_every_second",
        selection__filter="equal_rewards",
        record=str(tmp_path),
    )
    async with running(config) as handle, Operator(handle.address, handle.token) as operator:
        async with dora.Trainer(handle.address, token=handle.token) as trainer:
            steps = await train(handle, trainer, steps=4, groups=GROUPS)
        status = await until(operator, lambda status: status.counters["groups_filtered"] > 0)
    check_promises(steps, window=2, groups=GROUPS)
    trained = {group.group_id: {t.reward for t in group.trajectories} for step in steps for group in step}
    assert all(len(rewards) > 1 for rewards in trained.values())
    lines = (tmp_path / CANCELLED_FILE).read_text().splitlines()
    filtered = [line for line in map(json.loads, lines) if line["reason"] == "filtered: equal_rewards"]
    assert len(filtered) >= status.counters["groups_filtered"]
    assert all(line["rewards"][0] == line["rewards"][1] for line in filtered)
    assert not trained.keys() & {line["group_id"] for line in filtered}
    assert status.counters["groups_lost"] == 0 and status.HasField("dp_groups_to_add")


async def test_bad_input_is_refused_and_nothing_is_lost(tiny_dense: Path) -> None:
    config = configured(
        tiny_dense, workers__engine="fake", service__prompts_queued_max=8, prompts="none", reward__function=REWARD
    )
    async with running(config) as handle, dora.Prompts(handle.address, handle.token) as submitter:
        good = Prompt("p0", "echo", (1, 2, 3))
        await submitter.submit([good])
        with refused(Conflict, names=("p0",)):
            await submitter.submit([good])
        with refused(InvalidValue, field="tokens", value=250, names=("208",)):
            await submitter.submit([Prompt("long", "echo", (1,) * 250)])
        with refused(InvalidValue, field="sampling.temperature", value=99.0):
            await submitter.submit([Prompt("hot", "echo", (1,), sampling={"temperature": 99.0})])
        with refused(LimitExceeded, names=("8",)):
            await submitter.submit([Prompt(f"many{i}", "echo", (1,)) for i in range(9)])
        async with dora.Prompts(handle.address, "wrong") as stranger:
            with refused(Unauthenticated, field="token"):
                await stranger.submit([Prompt("p1", "echo", (1,))])
        async with Operator(handle.address, handle.token) as operator:
            with refused(NotFound, field="worker_id", value="nobody"):
                await operator.drain("nobody")
            with refused(NotFound, names=("g99.0",)):
                await operator.migrate("g99.0", "w0")
            status = await operator.status()
            assert status.prompts_queued == 1  # only the good one


@pytest.mark.parametrize(
    ("model", "fields", "field", "value"),
    [
        ("", {"prompts": "nothing-such"}, "--prompts", "nothing-such"),
        ("", {"reward__function": "no_module:fn"}, "--reward", "no_module:fn"),
        ("/nowhere", {}, "--model", "/nowhere"),
    ],
)
async def test_a_bad_start_says_what_is_wrong(
    tiny_dense: Path, model: str, fields: dict[str, str], field: str, value: str
) -> None:
    with refused(InvalidValue, field=field, value=value):
        async with running(configured(Path(model) if model else tiny_dense, workers__engine="fake", **fields)):
            pass


async def test_a_commit_waits_for_retired_versions_that_are_held(
    tiny_dense: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a worker holds one that is stopped while it loads: for longer than the wait where nobody is about to leave."""
    monkeypatch.setattr(publishing, "ROOM_WAIT_S", 0.0)
    # with what is allowed for headers, three of these small versions
    config = configured(tiny_dense, workers__engine="fake", window__size=2, service__weight_versions=2)
    async with running(config) as handle, dora.Trainer(handle.address, token=handle.token) as trainer:
        store = handle.run_folder / WEIGHTS_FOLDER
        with ExitStack() as holds:
            for version in ("1", "2"):
                await train(handle, trainer, steps=1, groups=GROUPS)
                holds.enter_context(held(store, name_of(store / VERSIONS_FOLDER / version), "a test"))
            training = asyncio.create_task(train(handle, trainer, steps=2, groups=GROUPS))
            while "version 1, retired and held by a test" not in caplog.text:
                await asyncio.wait({training}, timeout=0.05)
                assert not training.done()
        check_promises(await training, window=2, groups=GROUPS, first=2)


async def test_a_commit_is_refused_where_nothing_leaves_the_store(
    tiny_dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "ROOM_WAIT_S", 0.0)
    config = configured(tiny_dense, workers__engine="fake", service__weight_versions=1, window__size=2)
    async with running(config) as handle, dora.Trainer(handle.address, token=handle.token) as trainer:
        with refused(LimitExceeded, names=("1",)):
            await train(handle, trainer, steps=4, groups=GROUPS)


async def test_a_busy_port_is_named(tiny_dense: Path) -> None:
    async with running(configured(tiny_dense, workers__engine="fake")) as handle:
        with refused(InvalidValue, field="listen", value=handle.address):
            async with running(configured(tiny_dense, workers__engine="fake", service__listen=handle.address)):
                pass


async def test_a_drained_worker_leaves(tiny_dense: Path) -> None:
    async with (
        running(configured(tiny_dense, workers__engine="fake")) as handle,
        Operator(handle.address, handle.token) as operator,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        training = asyncio.create_task(train(handle, trainer, steps=4, groups=GROUPS))
        await until(operator, lambda status: status.counters["groups_admitted"] > 0)
        await operator.drain("w0")
        await until(operator, lambda status: any(w.worker_id == "w0" and w.state == "drained" for w in status.workers))
        with refused(Conflict, field="worker_id", value="w1"):
            await operator.drain("w1")
        steps = await training
    check_promises(steps, window=2, groups=GROUPS)


async def test_a_bad_commit_is_refused_and_a_good_one_follows(tiny_dense: Path) -> None:
    """Wrong version, names and shapes: each names what is wrong, the step stays open, its groups stay leased."""
    tensors = load_file(tiny_dense / "model.safetensors")
    first = sorted(tensors)[0]
    async with (
        running(configured(tiny_dense, workers__engine="fake")) as handle,
        dora.Trainer(handle.address, token=handle.token) as trainer,
        Operator(handle.address, handle.token) as operator,
    ):
        async for step in trainer.steps(groups=GROUPS):
            assert len([group async for group in step]) == GROUPS
            with refused(InvalidValue, field=f"weights: {first}", value=MISSING):
                await step.commit(weights={name: tensors[name] for name in tensors if name != first}, wait=True)
            with refused(InvalidValue, field=f"weights: {first}: shape"):
                await step.commit(weights={**tensors, first: tensors[first][:1]}, wait=True)
            with refused(InvalidValue, field="weights: tensor", value="stranger"):
                await step.commit(weights={**tensors, "stranger": tensors[first]}, wait=True)
            request = pb.CommitStepRequest(trainer_epoch=trainer.attachment.epoch, step=step.number, version=7)
            with refused(Conflict, field="version", value=7, names=("1",)):
                await trainer.connection.call(trainer.stub.CommitStep, request)
            assert (await operator.status()).newest_version == 0
            await step.commit(weights=tensors, wait=True)
            break
        status = await until(operator, lambda status: status.newest_version == 1)
        assert status.counters["groups_trained"] == GROUPS


@pytest.mark.full
async def test_a_stopped_worker_is_replaced(tiny_dense: Path) -> None:
    """It answers nothing and closes nothing: its requests go on elsewhere, and a new process takes its place."""
    config = configured(tiny_dense, window__size=2, workers__silence_timeout_s=2.0, **LONG)
    async with (
        running(config, processes=True) as handle,
        Operator(handle.address, handle.token) as operator,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        training = asyncio.create_task(train(handle, trainer, steps=4, groups=GROUPS))
        status = await until(operator, lambda status: status.counters["groups_admitted"] > 0)
        (stopped,) = (worker.pid for worker in status.workers if worker.worker_id == "w0")
        os.kill(stopped, signal.SIGSTOP)
        await until(
            operator,
            lambda status: any(w.worker_id == "w0" and w.state != "lost" and w.pid != stopped for w in status.workers),
        )
        steps = await training
        status = await operator.status()
    check_promises(steps, window=2, groups=GROUPS)
    assert status.counters["workers_lost"] >= 1
    assert status.counters["groups_lost"] == 0


@pytest.mark.full
async def test_a_service_that_was_stopped_itself_blames_nobody(tiny_dense: Path) -> None:
    """It heard nothing for longer than its limit for silent workers, as it was not there to hear."""
    config = configured(tiny_dense, window__size=2, workers__silence_timeout_s=2.0, **LONG)
    stop = "import os, signal, sys, time; os.kill(pid := int(sys.argv[1]), signal.SIGSTOP); time.sleep(5)"
    wake = f"{stop}; os.kill(pid, signal.SIGCONT)"  # of one process: this one is never woken before it is stopped
    async with (
        running(config, processes=True) as handle,
        Operator(handle.address, handle.token) as operator,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        training = asyncio.create_task(train(handle, trainer, steps=4, groups=GROUPS))
        await until(operator, lambda status: status.counters["groups_admitted"] > 0)
        waking = await asyncio.create_subprocess_exec(sys.executable, "-c", wake, str(os.getpid()))
        await waking.wait()
        steps = await training
        status = await operator.status()
    check_promises(steps, window=2, groups=GROUPS)
    assert status.counters["workers_lost"] == 0
