"""Failures of a trainer of two ranks: each rank ends within seconds with a reason, and the groups come again."""

import asyncio
import math
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

import dora
from dora.models.tiny import make_tiny
from dora.trainers.grpo import main
from dora.trainers.learner import Learner
from tests.contract.trainer_service import TOKEN, Running, StartService, make_group
from tests.private_token import with_token
from tests.sweeps import full
from tests.trainer_ranks import Rank, ended, start_ranks

GROUPS = 2
WITHIN_S = 60.0  # on a busy machine; what is waited for otherwise is the ranks' own timeout, far above


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("dense", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
async def service(start_service: StartService, tmp_path: Path, model_folder: Path) -> Running:
    return await start_service(tmp_path / "store", model_folder)


# --------------------------------------------------------------------------------------- what a rank does, of a sudden


def dies(learner: Learner) -> None:
    print(f"dies at {time.time()}")
    os.kill(os.getpid(), signal.SIGKILL)


def stands_still(learner: Learner) -> None:
    print(f"dies at {time.time()}")
    os.kill(os.getpid(), signal.SIGSTOP)


def has_no_number(learner: Learner) -> None:
    learner._sums.loss = math.nan


def is_elsewhere(learner: Learner) -> None:
    learner.step += 1


def has_a_bug(learner: Learner) -> None:
    raise ZeroDivisionError("by mistake")


def trainer(arguments: list[str], rank: int, fault: Callable[[Learner], None] | None) -> int:
    """``dora.trainers.grpo``; in step 1 the fault befalls this rank in the middle of its work."""
    backward = Learner._backward

    def with_fault(learner: Learner, rows: Any) -> None:
        backward(learner, rows)
        if fault is not None and learner.step == 1 and os.environ["RANK"] == str(rank):
            fault(learner)

    Learner._backward = with_fault  # type: ignore[method-assign]
    try:
        return main(arguments)
    finally:
        print(f"ended at {time.time()}")


def start(service: Running, folder: Path, rank: int, fault: Any, *more: str, timeout_s: float = 120.0) -> list[Rank]:
    given = ["--address", service.address, "--token-file", with_token(TOKEN), "--groups", str(GROUPS)]
    return start_ranks(
        2, folder, trainer, [*given, "--steps", "3", "--rank-timeout", str(timeout_s), *more], rank, fault
    )


async def check_undone(service: Running, model_folder: Path) -> None:
    """Only step 0 is committed; the groups of step 1 come again, and it can be committed."""
    assert [commit.step for commit in service.service.commits] == [0]
    async with dora.Trainer(service.address, token=TOKEN) as after:
        step = await anext(after.steps(groups=GROUPS))
        assert step.number == 1
        assert [group.group_id async for group in step] == ["s1-g0", "s1-g1"]
        await step.commit(load_file(model_folder / "model.safetensors"), wait=True)


async def texts_of(ranks: list[Rank]) -> tuple[list[int], list[str]]:
    codes = await asyncio.to_thread(ended, ranks)
    texts = [rank.text() for rank in ranks]
    times = [float(each) for text in texts for each in re.findall(r"(?:ended|dies) at ([\d.]+)", text)]
    assert max(times) - min(times) < WITHIN_S, texts
    return codes, texts


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.full), 1])
async def test_a_rank_that_dies_is_named_by_the_other(
    service: Running, model_folder: Path, tmp_path: Path, rank: int
) -> None:
    codes, texts = await texts_of(start(service, tmp_path / "ranks", rank, dies))
    assert codes[rank] == -signal.SIGKILL and codes[1 - rank] == 1, texts
    assert re.search(rf"^error: rank {rank} of 2 has died, .* as rank {1 - rank} of 2 found;", texts[1 - rank], re.M)
    await check_undone(service, model_folder)


@pytest.mark.full  # it waits until collectives give up
async def test_a_rank_that_stands_still_is_given_up(service: Running, model_folder: Path, tmp_path: Path) -> None:
    ranks = start(service, tmp_path / "ranks", 1, stands_still, timeout_s=20.0)
    await asyncio.to_thread(ranks[0].process.join, 240.0)
    ranks[1].process.kill()  # it would stand still for ever
    codes, texts = await texts_of(ranks)
    assert codes == [1, -signal.SIGKILL], texts
    assert "error: rank 1 of 2 has died, or has not answered for 20 s, as rank 0 of 2 found;" in texts[0], texts
    await check_undone(service, model_folder)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (has_no_number, "loss = nan is not valid: it must be finite; the optimiser took no step, and the step is not"),
        pytest.param(
            is_elsewhere,
            "the ranks disagree on step: rank 0 has 1, rank 1 has 2; nothing is committed",
            marks=pytest.mark.full,
        ),
    ],
)
async def test_what_all_see_all_say(
    service: Running, model_folder: Path, tmp_path: Path, fault: Callable[[Learner], None], says: str
) -> None:
    codes, texts = await texts_of(start(service, tmp_path / "ranks", 1, fault))
    assert codes == [1, 1] and all(says in text for text in texts), texts
    await check_undone(service, model_folder)


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.full)])
async def test_what_one_meets_the_other_says(service: Running, model_folder: Path, tmp_path: Path, rank: int) -> None:
    codes, texts = await texts_of(start(service, tmp_path / "ranks", rank, has_a_bug))
    assert codes == [1, 1], texts
    assert "ZeroDivisionError: by mistake" in texts[rank] and "Traceback" in texts[rank]
    said = rf"^error: rank {rank} of 2 failed: ZeroDivisionError: by mistake \(test_trainer_ranks.py"
    assert re.search(said, texts[1 - rank], re.MULTILINE), texts
    await check_undone(service, model_folder)


# ------------------------------------------------------------------------------------------- what the service has sent


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"logprobs": [math.nan] * 3}, "trajectory s1-g0-0: logprobs = nan is not valid: it must be finite"),
        *full(
            ({"logprobs": []}, "trajectory s1-g0-0: len(logprobs) = 0 is not valid: it must be one per response token"),
            (
                {"response_token_ids": [5, 6, 64]},
                "trajectory s1-g0-0: response_token_ids = 64 is not valid: it must be 0",
            ),
        ),
    ],
)
async def test_a_record_that_cannot_be_trained_on_ends_every_rank(
    service: Running,
    model_folder: Path,
    tmp_path: Path,
    changes: dict[str, Any],
    says: str,
) -> None:
    def spoilt(step: int, group: int, group_size: int = 2) -> Any:
        found = make_group(step, group, group_size)
        if (step, group) != (1, 0):
            return found
        first = replace(found.trajectories[0])
        for name, value in changes.items():  # past the checks of the service's own side
            object.__setattr__(first, name, np.array(value, getattr(first, name).dtype))
        return replace(found, trajectories=(first, *found.trajectories[1:]))

    service.service.group_of = spoilt
    codes, texts = await texts_of(start(service, tmp_path / "ranks", 0, None))
    service.service.group_of = make_group
    assert codes == [1, 1], texts
    assert f"error: {says}" in texts[0] and f"error: rank 0 of 2 failed: {says}" in texts[1], texts
    await check_undone(service, model_folder)


async def test_another_model_is_refused_before_the_first_step(service: Running, tmp_path: Path) -> None:
    other = make_tiny("moe", tmp_path / "other")
    codes, texts = await texts_of(start(service, tmp_path / "ranks", 0, None, "--model", str(other)))
    assert codes == [1, 1] and service.service.commits == [], texts
    says = rf"--model = '{other}' is another model: it must be the service's model \(weights: "
    assert re.search(rf"^error: {says}", texts[0], re.MULTILINE), texts
    assert re.search(rf"^error: (rank 0 of 2 failed: )?{says}", texts[1], re.MULTILINE), texts
