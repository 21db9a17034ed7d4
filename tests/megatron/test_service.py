"""The Megatron trainer's command against a service: commits, checkpoints, and what ends it."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron", reason="Megatron has an environment of its own: make test-megatron")

import numpy as np
from safetensors.torch import load_file

from dora.models.tiny import make_tiny
from dora.ops.verify.recompute import load_model
from dora.trainers.checkpoint import path_of, steps_in
from dora.weights.canary import compute_canary
from tests.contract.trainer_service import TOKEN, Running, StartService
from tests.megatron.world import WORLD, start
from tests.private_token import with_token
from tests.trainer_ranks import Rank, ended


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("dense", tmp_path_factory.mktemp("models") / "tiny", kv_heads=2)


@pytest.fixture
async def service(start_service: StartService, tmp_path: Path, model: Path) -> Running:
    return await start_service(tmp_path / "store", model, total_groups=12)


def command(arguments: list[str], plant: str = "") -> int:
    """One rank of the trainer. ``plant``: what goes wrong in rank 1, at the step's end."""
    from dora.trainers.megatron.__main__ import main
    from dora.trainers.megatron.part import Part

    reduce = Part.reduce

    def planted(part: Part, units: float) -> float:
        if part.built.place.rank == 1:
            if plant == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if plant == "raises":
                raise MemoryError("no room for the gradient")
            if plant == "nan":
                next(iter(part.built.module.parameters())).main_grad[0] = float("nan")
            if plant == "drifts":
                part.built.module.decoder.layers[0].input_layernorm.weight.data[0] += 0.1
        return reduce(part, units)

    if plant:
        Part.reduce = planted  # type: ignore[method-assign]
    return main(arguments)


def options(service: Running, *others: str) -> list[str]:
    """With one group a step: of several it depends on the moment how they are cut into micro-batches."""
    common = ["--address", service.address, "--token-file", with_token(TOKEN), "--groups", "1", "--lr", "1e-3"]
    return [*common, "--json", "--rank-timeout", "60", *others]


async def outcome(ranks: list[Rank]) -> list[int]:
    return await asyncio.to_thread(ended, ranks)


def steps_of(rank: Rank) -> list[dict[str, Any]]:
    return [json.loads(line) for line in rank.text().splitlines() if line.startswith("{")]


def tensors_in(folder: Path) -> dict[str, Any]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


async def test_versions_are_committed_and_a_later_trainer_goes_on(
    start_service: StartService, tmp_path: Path, service: Running
) -> None:
    checkpoints = tmp_path / "checkpoints"
    given = options(service, "--checkpoints", str(checkpoints), "--steps")
    whole = start(tmp_path / "whole", command, [*given, "4", "--tp", "2"])
    assert await outcome(whole) == [0] * WORLD, whole[0].text()
    assert [step["step"] for step in steps_of(whole[0])] == [0, 1, 2, 3] and steps_in(checkpoints) == [3, 4]
    store = service.service.store
    assert store.versions() == (0, 1, 2, 3, 4) and len(service.service.commits[0].files) == 2
    first = tensors_in(store.folder(4))
    canary, expected = service.service.commits[3].canary, compute_canary(load_model(store.folder(4)))
    assert tuple(np.frombuffer(canary.token_ids, "<i4")) == expected.token_ids
    assert np.frombuffer(canary.logprobs, "<f4") == pytest.approx(expected.logprobs, abs=1e-3)

    # The same stream once more, by a trainer that ends after two steps and one that goes on.
    again = await start_service(tmp_path / "again", Path(store.reference.folder), total_groups=12)
    for name in ("3", "4"):
        (checkpoints / f"step-{name}").rename(tmp_path / f"old-{name}")
    given[1] = again.address
    for part in ("first", "second"):
        ranks = start(tmp_path / part, command, [*given, "2", "--tp", "2"])
        assert await outcome(ranks) == [0] * WORLD, ranks[0].text()
    second = tensors_in(again.service.store.folder(4))
    assert first.keys() == second.keys()
    assert all(first[name].equal(second[name]) for name in first), "as if it had never ended"

    # Other ranks cannot read these states.
    ranks = start(tmp_path / "other", command, [*given, "1", "--pp", "2"])
    assert await outcome(ranks) == [1] * WORLD
    assert "step-4: layout" in ranks[0].text() and "'tp': 2" in ranks[0].text()


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        ("dies", r"rank 1 of 2 has died"),
        ("raises", r"no room for the gradient"),
        ("nan", r"grad_norm = nan"),
        ("drifts", r"the ranks disagree on the weights of stage 0, tensor rank 0"),
    ],
)
async def test_a_step_that_goes_wrong_is_not_committed(tmp_path: Path, service: Running, plant: str, said: str) -> None:
    began_s = asyncio.get_running_loop().time()
    ranks = start(tmp_path, command, options(service, "--steps", "2"), plant)
    codes = await outcome(ranks)
    assert codes[0] == 1 and codes[1] == (-signal.SIGKILL if plant == "dies" else 1), ranks[0].text()
    assert said in ranks[0].text(), ranks[0].text()
    if plant != "dies":
        assert said in ranks[1].text(), ranks[1].text()
    assert not service.service.commits and service.service.next_step == 0
    assert asyncio.get_running_loop().time() - began_s < 120.0, "by far no time limit"


async def test_another_model_than_the_service_has_is_refused(tmp_path: Path, service: Running) -> None:
    moe = make_tiny("moe", tmp_path / "moe", kv_heads=2)
    ranks = start(tmp_path / "ranks", command, options(service, "--model", str(moe), "--ep", "2"))
    assert await outcome(ranks) == [1] * WORLD
    for rank in ranks:
        assert "another model" in rank.text(), rank.text()
    assert path_of(tmp_path, 1).name == "step-1" and not service.service.commits


async def test_a_layout_that_does_not_fit_is_refused(tmp_path: Path, service: Running) -> None:
    ranks = start(tmp_path, command, options(service, "--tp", "3"))
    assert await outcome(ranks) == [1] * WORLD
    assert "a divisor of the number of ranks, 2" in ranks[0].text(), ranks[0].text()
