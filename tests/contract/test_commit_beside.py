"""A commit goes on beside training: the weights may change as soon as it returns; what fails is told later, once."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dora.errors import Conflict, InvalidValue, VersionRejected
from dora.weights.canary import compute_canary
from tests.contract.test_client import GROUPS, client, group_ids, model_folder, service, tensors, trainer_of
from tests.contract.trainer_service import Running
from tests.refusals import refused

__all__ = ["client", "model_folder", "service", "tensors"]  # fixtures

NAME = "model.norm.weight"


@pytest.fixture
async def steps(service: Running) -> AsyncIterator[tuple[Any, Any]]:
    async with trainer_of(service) as trainer:
        yield trainer, trainer.steps(groups=GROUPS)


def weights_of(service: Running, version: int) -> dict[str, Any]:
    from safetensors.numpy import load_file

    return load_file(service.service.store.folder(version) / "model.safetensors")


def damage(tensors: dict[str, Any]) -> None:
    """Changes the weights as the next step does, only more."""
    for tensor in tensors.values():
        tensor[...] = np.nan


async def test_weights_may_change_as_soon_as_a_commit_returns(service: Running, tensors: dict[str, Any]) -> None:
    kept = {name: tensor.copy() for name, tensor in tensors.items()}
    async with trainer_of(service) as trainer:
        async for step in trainer.steps(groups=GROUPS):
            await group_ids(step)
            commit = await step.commit(tensors)
            assert commit.version == step.number + 1 and step.committed
            damage(tensors)
            tensors.update({name: tensor.copy() for name, tensor in kept.items()})
            if step.number == 2:
                break
    assert service.service.store.versions() == (0, 1, 2, 3), "leaving waits for the last"
    for version in (1, 2, 3):
        found = weights_of(service, version)
        assert all(np.array_equal(found[name], tensor) for name, tensor in kept.items())


@pytest.mark.parametrize("shared", [True, False])
async def test_a_commit_that_has_to_be_repeated_brings_what_was_taken(
    shared: bool, service: Running, tensors: dict[str, Any]
) -> None:
    """Attaching anew throws away what lay in the store, and the trainer has other weights by then."""
    service.service.shared, service.service.faults.before_commit = shared, 1
    kept = tensors[NAME].copy()
    async with trainer_of(service) as trainer:
        step = await anext(trainer.steps(groups=GROUPS))
        await group_ids(step)
        await step.commit(tensors)
        damage(tensors)
    assert service.service.epoch == 2
    assert np.array_equal(weights_of(service, 1)[NAME], kept)


async def test_the_canary_is_of_the_weights_that_were_taken(service: Running, model_folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    module.train()
    expected = compute_canary(module)
    async with trainer_of(service) as trainer:
        step = await anext(trainer.steps(groups=GROUPS))
        await group_ids(step)
        await step.commit(module)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
    assert service.service.store.canary(1) == expected and module.training


async def test_weights_that_are_not_finite_are_told_by_the_next_call_once(
    steps: tuple[Any, Any], service: Running, tensors: dict[str, Any]
) -> None:
    trainer, iterator = steps
    step = await anext(iterator)
    await group_ids(step)
    await step.commit({**tensors, NAME: np.full_like(tensors[NAME], np.nan)})
    with refused(InvalidValue, field=f"weights: {NAME}", value="inf or NaN"):
        await anext(iterator)
    assert not step.committed and service.service.store.versions() == (0,)
    await trainer.settled()
    await step.commit(tensors)
    await trainer.settled()
    assert step.committed and service.service.store.versions() == (0, 1)


async def test_a_fenced_trainer_is_told_by_its_next_call(
    steps: tuple[Any, Any], service: Running, tensors: dict[str, Any]
) -> None:
    _, iterator = steps
    step = await anext(iterator)
    await group_ids(step)
    async with trainer_of(service) as other:
        await other.attach(GROUPS)
        await step.commit(tensors)
        with refused(Conflict, names=("trainer_epoch",)):
            await anext(iterator)
    assert service.service.store.versions() == (0,)


async def test_a_commit_under_way_goes_on_once_a_rejected_version_is_published_anew(
    service: Running, tensors: dict[str, Any]
) -> None:
    """Version 1 is rejected while the next step is trained: its commit waits, and is not made a second time."""
    inside = service.service
    async with trainer_of(service) as trainer:
        iterator = trainer.steps(groups=GROUPS)
        step = await anext(iterator)
        await group_ids(step)
        await step.commit(tensors)
        step = await anext(iterator)
        await group_ids(step)
        inside.rejected, inside.faults.rejections = 1, {1: 1}
        await step.commit(tensors)
        following = await anext(iterator)
        with pytest.raises(VersionRejected):
            await group_ids(following)
        with pytest.raises(VersionRejected):
            await trainer.settled()
        await trainer.republish(tensors, version=1)
        assert len(await group_ids(following)) == GROUPS
    assert [commit.version for commit in inside.commits] == [1, 2] and len(inside.republished) == 1


async def test_an_error_in_training_is_not_hidden_by_a_commit_that_fails(
    service: Running, tensors: dict[str, Any]
) -> None:
    with pytest.raises(ZeroDivisionError):
        async with trainer_of(service) as trainer:
            step = await anext(trainer.steps(groups=GROUPS))
            await group_ids(step)
            await step.commit({**tensors, NAME: np.full_like(tensors[NAME], np.inf)})
            raise ZeroDivisionError
    assert service.service.store.versions() == (0,)


async def test_what_a_retired_version_leaves_is_written_over(service: Running, tensors: dict[str, Any]) -> None:
    """On one host a version's memory is used again, and another version that is still there is not touched."""
    store = service.service.store
    numbers: dict[int, int] = {}
    async with trainer_of(service) as trainer:
        async for step in trainer.steps(groups=GROUPS):
            await group_ids(step)
            tensors[NAME] = np.full_like(tensors[NAME], step.number)
            await step.commit(tensors, wait=True)
            numbers[step.number + 1] = (store.folder(step.number + 1) / "model.safetensors").stat().st_ino
            store.retire(step.number)
            if step.number == 4:
                break
    assert len(set(numbers.values())) < len(numbers)
    assert float(weights_of(service, 5)[NAME][0]) == 4.0


async def test_from_another_host_only_what_differs_travels(
    service: Running, tensors: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a link so slow that a delta pays; a base that is gone, as after a restart, costs one whole upload more."""
    from dora.client import publication

    inside = service.service
    inside.shared = False
    monkeypatch.setattr(publication.Delta, "pays", lambda _: True)
    async with trainer_of(service) as trainer:
        async for step in trainer.steps(groups=GROUPS):
            await group_ids(step)
            tensors[NAME] = np.full_like(tensors[NAME], step.number)
            await step.commit(tensors, wait=True)
            assert np.array_equal(weights_of(service, step.number + 1)[NAME], tensors[NAME])
            if step.number == 1:
                inside.store.retire(2)
            if step.number == 3:
                break
    whole, second, third, fourth = inside.upload_bytes
    assert second < whole / 20 and third == whole and fourth < whole / 20


# -------------------------------------------------------------------------------------------------------------- images


@pytest.mark.parametrize("client", ["asynchronous"], indirect=True)
@pytest.mark.parametrize("kind", ["torch", "numpy"])
async def test_torch_weights_have_an_image_until_the_next_commit_or_the_trainers_end(
    service: Running, tensors: dict[str, Any], kind: str
) -> None:
    import torch

    from dora.client.device_image import Images
    from dora.weights.image import noted
    from tests import host_images

    inside, published = service.service, tensors
    inside.takes_images = True
    if kind == "torch":
        published = {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}

    def has_image(version: int) -> bool:
        with noted(inside.store.folder(version)) as note:
            return note is not None

    async with trainer_of(service) as trainer:
        trainer._images = Images(host_images.made)
        async for step in trainer.steps(groups=GROUPS):
            await group_ids(step)
            await step.commit(published, wait=True)
            found = [has_image(version) for version in range(1, step.number + 2)]
            assert found == [False] * step.number + [kind == "torch"]
            if step.number == 2:
                break
    assert not has_image(3)
    assert np.array_equal(weights_of(service, 3)[NAME], tensors[NAME])
