"""The contract of the trainer's client and a service, over real gRPC.

The client is a parameter: the synchronous one keeps the same promises. The first part holds for any service that
serves two groups a step of its own making; the second part breaks connections, which takes the scripted service.
"""

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dora
from dora.client.trainer import ENDED, UNSAID
from dora.data.types import Prompt
from dora.errors import MISSING, Conflict, InvalidValue, VersionRejected
from dora.models.tiny import make_tiny
from dora.prompts.tokenizer import ChatTokenizer
from dora.rpc import dora_pb2 as pb
from dora.rpc.convert import trajectory_to_wire
from dora.rpc.errors import LimitExceeded, ServiceUnavailable, Unauthenticated
from dora.weights.canary import compute_canary
from tests.contract.awaited import AwaitedPrompts, AwaitedTrainer
from tests.contract.trainer_service import TOKEN, Running, StartService, make_trajectory
from tests.refusals import refused

GROUPS = 2


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("dense", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(params=["asynchronous", "synchronous"])
def client(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# What the client sends by hand goes past the clients' own methods, so one of them is enough.
by_hand = pytest.mark.parametrize("client", ["asynchronous"], indirect=True)


@pytest.fixture
async def service(start_service: StartService, client: str, tmp_path: Path, model_folder: Path) -> Running:
    running = await start_service(tmp_path / "store", model_folder)
    running.client = client
    return running


@pytest.fixture
def tensors(model_folder: Path) -> dict[str, Any]:
    from safetensors.numpy import load_file

    return load_file(model_folder / "model.safetensors")


def trainer_of(service: Running, **options: Any) -> Any:
    options = {"token": TOKEN, "reconnect_s": 20.0, **options}
    if service.client == "synchronous":
        return AwaitedTrainer(dora.sync.Trainer(service.address, **options))
    return dora.Trainer(service.address, **options)


def prompts_of(service: Running, **options: Any) -> Any:
    if service.client == "synchronous":
        return AwaitedPrompts(dora.sync.Prompts(service.address, TOKEN, **options))
    return dora.Prompts(service.address, TOKEN, **options)


async def group_ids(step: Any) -> list[str]:
    return [group.group_id async for group in step]


# ------------------------------------------------------------------------------------------ any service


async def test_whole_groups_arrive_and_versions_are_published(service: Running, tensors: dict[str, Any]) -> None:
    seen = []
    async with trainer_of(service) as trainer:
        async for step in trainer.steps(groups=GROUPS):
            async for group in step:
                assert len(group) == group.trajectories[0].group_size
                assert group.tokens().shape == group.logprobs().shape == group.loss_mask().shape
                assert group.tokens().dtype == np.int32 and group.logprobs().dtype == np.float32
                seen.append(group.group_id)
            commit = await step.commit(weights=tensors, metrics={"loss": 0.5}, wait=True)
            assert commit.version == step.number + 1
            if step.number == 2:
                break
    assert len(seen) == len(set(seen)) == 3 * GROUPS


async def test_commit_is_idempotent(service: Running, tensors: dict[str, Any]) -> None:
    async with trainer_of(service) as trainer:
        step = await anext(trainer.steps(groups=GROUPS))
        await group_ids(step)
        assert await step.commit(tensors, wait=True) == await step.commit(tensors, wait=True)
        assert (await trainer.attach(GROUPS)).next_step == 1


async def test_uncommitted_groups_come_again_to_the_next_trainer(service: Running, tensors: dict[str, Any]) -> None:
    async with trainer_of(service) as first, trainer_of(service) as second:
        step = await anext(first.steps(groups=GROUPS))
        taken = await group_ids(step)
        again = await anext(second.steps(groups=GROUPS))
        assert sorted(await group_ids(again)) == sorted(taken)
        with refused(Conflict, names=("trainer_epoch",)):
            await step.commit(tensors, wait=True)
        await again.commit(tensors, wait=True)


async def test_commit_before_all_groups_were_taken_is_refused(service: Running, tensors: dict[str, Any]) -> None:
    async with trainer_of(service) as trainer:
        steps = trainer.steps(groups=GROUPS)
        step = await anext(steps)
        await anext(step)
        with refused(Conflict, names=("1", "2")):
            await step.commit(tensors, wait=True)
        with refused(Conflict, field="step", value=0, why="is not committed"):
            await anext(steps)


async def test_wrong_weights_name_the_tensor_and_the_service_goes_on(service: Running, tensors: dict[str, Any]) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    async with trainer_of(service) as trainer:
        step = await anext(trainer.steps(groups=GROUPS))
        await group_ids(step)
        with refused(InvalidValue, field=f"weights: {name}: shape", value=[256, 128], allowed=[128, 256]):
            await step.commit({**tensors, name: tensors[name].T}, wait=True)
        with refused(InvalidValue, field="weights: tensor", value="surplus"):
            await step.commit({**tensors, "surplus": tensors[name]}, wait=True)
        with refused(InvalidValue, field=f"weights: {name}", value=MISSING):
            await step.commit({key: value for key, value in tensors.items() if key != name}, wait=True)
        with refused(InvalidValue, field="weights", value="int"):
            await step.commit(7, wait=True)  # type: ignore[arg-type]
        assert (await step.commit(tensors, wait=True)).version == 1


@by_hand
async def test_the_service_itself_refuses_wrong_versions_and_weights(service: Running, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    from dora.weights.files import hash_file

    async with trainer_of(service) as trainer:
        await group_ids(await anext(trainer.steps(groups=GROUPS)))
        epoch = trainer.attachment.epoch
        request = pb.CommitStepRequest(trainer_epoch=epoch, step=0, version=7)
        with refused(Conflict, field="version", value=7) as caught:
            await trainer.connection.call(trainer.stub.CommitStep, request)
        assert caught.value.field == "version" and caught.value.value == "7"

        assert trainer.attachment.store_folder is not None
        incoming = trainer.attachment.store_folder / "incoming" / f"{epoch}-1"
        incoming.mkdir(exist_ok=True)
        save_file({"nonsense": np.zeros(3, np.float32)}, incoming / "model.safetensors")
        found = hash_file(incoming / "model.safetensors")
        file = pb.WeightFile(name=found.name, file_bytes=found.file_bytes, blake3=found.blake3)
        request = pb.CommitStepRequest(trainer_epoch=epoch, step=0, version=1, files=[file])
        with refused(InvalidValue, field="weights: model.embed_tokens.weight", value=MISSING):
            await trainer.connection.call(trainer.stub.CommitStep, request)


@by_hand
async def test_without_the_token_nothing_is_served(service: Running) -> None:
    for token in ("", "wrong"):
        async with trainer_of(service, token=token) as trainer:
            with refused(Unauthenticated, field="token") as caught:
                await trainer.attach(GROUPS)
            assert TOKEN not in str(caught.value)
            stream = trainer.stub.StreamStep(pb.StreamStepRequest())
            with refused(Unauthenticated, field="token"):
                await trainer.connection.read(stream)


async def test_texts_are_what_the_services_tokenizer_makes_of_the_ids(service: Running, model_folder: Path) -> None:
    theirs = ChatTokenizer(model_folder)
    async with trainer_of(service) as trainer:
        group = await anext(await anext(trainer.steps(groups=GROUPS)))
        for trajectory in group.trajectories:
            assert trajectory.text == theirs.decode(trajectory.response_token_ids.tolist()) != ""
        assert group.prompt_text == theirs.decode([1, 2], special_tokens=True) != ""
    service.service.shared = False  # the path that the service names is then another host's
    for folder in (None, model_folder):
        async with trainer_of(service, tokenizer=folder) as trainer:
            group = await anext(await anext(trainer.steps(groups=GROUPS)))
            if folder is None:
                with refused(Conflict, field="tokenizer"):
                    group.prompt_text  # noqa: B018
            else:
                assert group.prompt_text == theirs.decode([1, 2], special_tokens=True)


async def test_groups_per_step_must_agree(service: Running) -> None:
    async with trainer_of(service) as trainer:
        await trainer.attach(GROUPS)
        with refused(Conflict, names=("groups_per_step",)):
            await trainer.attach(GROUPS + 1)
        assert (await trainer.attach()).groups_per_step == GROUPS


async def test_prompts_are_queued_all_or_nothing(service: Running) -> None:
    prompts = [Prompt(f"prompt-{index}", "toy", (5, 6, 7), sampling={"temperature": 0.7}) for index in range(3)]
    async with prompts_of(service) as client:
        assert (await client.submit(prompts)).accepted == 3
        with refused(Conflict, names=("prompt-0",)):
            await client.submit([Prompt("new", "toy", (5,)), prompts[0]])
        assert (await client.submit([Prompt("new", "toy", (5,))])).accepted == 1


async def test_a_message_over_the_limit_is_refused_before_it_is_sent(service: Running) -> None:
    huge = Prompt("huge", "toy", tuple(range(300_000)))
    async with prompts_of(service, max_message_bytes=1 << 20) as client:
        with refused(LimitExceeded, field="SubmitRequest: message bytes"):
            await client.submit([huge])
    async with prompts_of(service) as unaware:  # the service refuses what its client let pass
        if service.service.max_message_bytes == 1 << 20:
            with pytest.raises(LimitExceeded):
                await unaware.submit([huge])
        assert (await unaware.submit([Prompt("small", "toy", (1,))])).accepted == 1


async def test_a_module_is_published_with_its_canary(service: Running, model_folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    module.train()
    async with trainer_of(service) as trainer:
        step = await anext(trainer.steps(groups=GROUPS))
        await group_ids(step)
        await step.commit(weights=module, wait=True)
    assert module.training
    store = service.service.store
    assert store.canary(1) == compute_canary(module)
    reloaded = AutoModelForCausalLM.from_pretrained(store.folder(1), dtype=torch.float32)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, reloaded.state_dict()[name]), name


@by_hand
async def test_a_refused_upload_says_why_however_long_it_is(service: Running) -> None:
    async with trainer_of(service) as trainer:
        epoch = (await trainer.attach(GROUPS)).epoch

        async def messages(name: str, announced_bytes: int, chunks: int) -> AsyncIterator[pb.WeightChunk]:
            header = {"trainer_epoch": epoch, "version": 1, "file_name": name, "file_bytes": announced_bytes}
            yield pb.WeightChunk(header=pb.WeightFileHeader(**header))
            for _ in range(chunks):
                yield pb.WeightChunk(content=bytes(1 << 19))

        for name, announced_bytes, chunks, field, value in (
            ("../model.safetensors", 32 << 20, 64, "weights: file name", "../model.safetensors"),
            ("model.safetensors", 1 << 40, 64, "file_bytes", 1 << 40),
            ("model.safetensors", 1 << 20, 64, "file_bytes", f"more than {1 << 20}"),
            ("model.safetensors", 1 << 20, 1, "file_bytes", 1 << 19),
        ):
            with refused(InvalidValue, field=field, value=value):
                await trainer.connection.upload(trainer.stub.UploadWeights, messages(name, announced_bytes, chunks))


# ----------------------------------------------------------------------------------- the scripted service


async def test_a_group_too_large_for_a_message_arrives_whole(service: Running, tensors: dict[str, Any]) -> None:
    """Also where the connection breaks between its parts: what came before it is not mixed with what comes again."""
    service.service.group_size = 5
    service.service.cut_bytes = 2 * trajectory_to_wire(make_trajectory(0, 0, 0, 5)).ByteSize() + 200
    service.service.faults.after_parts = [1, 2]
    async with trainer_of(service) as trainer:
        step = await anext(trainer.steps(groups=GROUPS))
        groups = [group async for group in step]
        assert [group.group_id for group in groups] == [f"s0-g{index}" for index in range(GROUPS)]
        for group in groups:
            assert [each.sample_index for each in group.trajectories] == list(range(5))
        await step.commit(tensors, wait=True)
    assert not service.service.faults.after_parts


async def test_a_broken_stream_is_attached_again_and_no_group_comes_twice(
    service: Running, tensors: dict[str, Any]
) -> None:
    service.service.faults.after_groups = [1, 0, 1]
    async with trainer_of(service) as trainer:
        step = await anext(trainer.steps(groups=4))
        assert await group_ids(step) == ["s0-g0", "s0-g1", "s0-g2", "s0-g3"]
        await step.commit(tensors, wait=True)
    assert service.service.epoch == 4
    assert service.service.next_step == 1


async def test_a_stream_that_ends_early_without_a_word_is_a_broken_one(service: Running) -> None:
    service.service.faults.after_groups = [1]
    service.service.faults.quiet_ends = 1
    async with trainer_of(service) as trainer:
        step = await anext(trainer.steps(groups=GROUPS))
        assert await group_ids(step) == ["s0-g0", "s0-g1"]


@by_hand
async def test_a_wait_that_is_given_up_loses_no_group(service: Running, tensors: dict[str, Any]) -> None:
    """gRPC ends a stream whose reading is cancelled, as a time limit does."""
    service.service.faults.hold_after = 1
    async with trainer_of(service) as trainer:
        step = await anext(trainer.steps(groups=GROUPS))
        taken = [(await anext(step)).group_id]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(step), timeout=0.1)
        taken += await group_ids(step)
        await step.commit(tensors, wait=True)
    assert taken == ["s0-g0", "s0-g1"]


async def test_a_restarted_service_is_found_again(service: Running, tensors: dict[str, Any]) -> None:
    async with trainer_of(service) as trainer:
        steps = trainer.steps(groups=GROUPS)
        step = await anext(steps)
        await anext(step)
        await service.restart()
        assert await group_ids(step) == ["s0-g1"]
        await service.restart()
        await step.commit(tensors, wait=True)
        step = await anext(steps)
        assert await group_ids(step) == ["s1-g0", "s1-g1"]


async def test_a_commit_lost_before_it_was_carried_out_is_repeated(service: Running, tensors: dict[str, Any]) -> None:
    service.service.faults.before_commit = 2
    async with trainer_of(service) as trainer:
        step = await anext(trainer.steps(groups=GROUPS))
        await group_ids(step)
        commit = await step.commit(tensors, wait=True)
    assert (commit.version, commit.groups_trained) == (1, GROUPS)
    assert len(service.service.commits) == 1 and service.service.epoch == 3


async def test_a_commit_whose_reply_was_lost_is_not_repeated(service: Running, tensors: dict[str, Any]) -> None:
    service.service.faults.after_commit = 1
    async with trainer_of(service) as trainer:
        steps = trainer.steps(groups=GROUPS)
        step = await anext(steps)
        await group_ids(step)
        commit = await step.commit(tensors, wait=True)
        assert (commit.version, commit.groups_trained) == (1, None)
        assert (await anext(steps)).number == 1
    assert len(service.service.commits) == 1


async def test_a_step_that_was_filled_with_other_groups_is_not_trained_as_if_it_were_the_same(
    service: Running, tensors: dict[str, Any]
) -> None:
    service.service.faults.other_groups = True
    service.service.faults.after_groups = [1]
    async with trainer_of(service) as trainer:
        with refused(Conflict, names=("s0-g100",)):
            await group_ids(await anext(trainer.steps(groups=GROUPS)))

        step = await anext(trainer.steps())
        await group_ids(step)
        service.service.faults.before_commit = 1
        with refused(
            Conflict, field="step", value=0, why="has changed: the service added groups to it since it was trained"
        ):
            await step.commit(tensors, wait=True)
    assert service.service.next_step == 0


@by_hand
async def test_an_upload_cut_off_by_a_restart_is_a_broken_connection(service: Running) -> None:
    async with trainer_of(service) as trainer:
        epoch = (await trainer.attach(GROUPS)).epoch

        async def messages() -> AsyncIterator[pb.WeightChunk]:
            header = pb.WeightFileHeader(trainer_epoch=epoch, version=1, file_name="a.safetensors", file_bytes=1 << 20)
            yield pb.WeightChunk(header=header)
            for index in range(64):
                if index == 8:
                    await service.restart()
                yield pb.WeightChunk(content=bytes(1 << 14))

        with pytest.raises(ServiceUnavailable):
            await trainer.connection.upload(trainer.stub.UploadWeights, messages())


async def test_patience_ends(service: Running) -> None:
    await service.server.stop(None)
    async with trainer_of(service, connect_s=0.2) as trainer:
        with refused(ServiceUnavailable, field="connect_s", value=0.2):
            await trainer.attach(GROUPS)


async def test_another_host_uploads(service: Running, tensors: dict[str, Any], model_folder: Path) -> None:
    service.service.shared = False
    async with trainer_of(service) as trainer:
        steps = trainer.steps(groups=GROUPS)
        step = await anext(steps)
        assert trainer.attachment.store_folder is None
        await group_ids(step)
        await step.commit(tensors, wait=True)
        step = await anext(steps)
        await group_ids(step)
        await step.commit(model_folder / "model.safetensors", wait=True)
    assert service.service.uploads == ["model.safetensors", "model.safetensors"]
    assert service.service.store.versions() == (0, 1, 2)


async def test_steps_end_with_the_prompts(
    start_service: StartService,
    client: str,
    tmp_path: Path,
    model_folder: Path,
    tensors: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = await start_service(tmp_path / "store", model_folder, total_groups=4)
    service.client = client
    async with trainer_of(service) as trainer:
        numbers = []
        async for step in trainer.steps(groups=GROUPS):
            numbers.append(step.number)
            await group_ids(step)
            await step.commit(tensors, wait=True)
        assert numbers == [0, 1]
        assert not [record for record in caplog.records if record.name == "dora.client"]
    async with trainer_of(service) as trainer:
        assert [step.number async for step in trainer.steps()] == []
    said = [record.getMessage() for record in caplog.records if record.name == "dora.client"]
    assert said == [ENDED % (2, service.address, UNSAID)]


async def test_a_short_last_step_is_the_end(
    start_service: StartService, client: str, tmp_path: Path, model_folder: Path, tensors: dict[str, Any]
) -> None:
    service = await start_service(tmp_path / "store", model_folder, total_groups=3)
    service.client = client
    async with trainer_of(service) as trainer:
        taken = []
        async for step in trainer.steps(groups=GROUPS):
            taken.append(len(await group_ids(step)))
            await step.commit(tensors, wait=True)
        assert step.end_of_prompts
    assert taken == [2, 1]
    assert service.service.next_step == 2


# -------------------------------------------------------------------------------------------------- rejected versions


@pytest.mark.parametrize("shared", [True, False])
async def test_a_rejected_version_is_published_anew_and_the_step_goes_on(
    shared: bool, service: Running, tensors: dict[str, Any]
) -> None:
    """The reply to its new weights is lost, and asked for again: the step has each group once, and one commit."""
    inside = service.service
    inside.shared, inside.faults.rejections, inside.faults.after_republish = shared, {1: 1}, 1
    told: list[VersionRejected] = []
    async with trainer_of(service) as trainer:
        groups: list[str] = []
        async for step in trainer.steps(groups=2):
            while not step.committed:
                try:
                    async for group in step:
                        groups.append(group.group_id)
                    await step.commit(weights=tensors, wait=True)
                except VersionRejected as rejected:
                    told.append(rejected)
                    await trainer.republish(tensors, version=rejected.version)
            if step.number == 1:
                break
    assert groups == ["s0-g0", "s0-g1", "s1-g0", "s1-g1"] and len(inside.commits) == 2
    facts = {(each.version, each.worker_ids, each.reason, each.canary_difference) for each in told}
    assert len(told) == 1 and facts == {(1, ("w0", "w1"), "it differs, by far", math.inf)}
    assert len(inside.republished) == 1 and inside.epoch == 2
    assert ("model.safetensors" in inside.uploads) != shared
