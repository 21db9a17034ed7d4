"""``examples/two_turns.py``: a tiny model learns to use what the environment of a session answers."""

import argparse
import asyncio
import os
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import pytest

import dora
from dora.data.run_record import TRAJECTORIES_FILE
from dora.data.trajectory import Trajectory
from dora.models.tiny_vocabulary import CLASSES, VOCABULARY
from dora.ops.demo.trainer_process import TrainerProcess
from dora.ops.verify.check import read_trajectories, verify
from examples.two_turns import ANSWER_TOKENS, QUESTION_TOKENS, run
from tests.e2e.restarts import Killed
from tests.service import check_promises, configured, running, train
from tests.snippets import ROOT

GROUPS, GROUP_SIZE = 12, 8
IGNORED = 0.25  # the highest reward of a policy that ignores the answer: one of four classes is right
REWARD = "dora.rewards.tiny:score"  # of prompts without an environment, of which there are none here


def check_session(trajectory: Trajectory) -> None:
    """Its reward is that of the second turn, and the trainer trains on all tokens but the answer's."""
    (given,) = trajectory.events
    assert (given.name, given.position_token) == ("class", QUESTION_TOKENS + 1)
    words = [VOCABULARY[token_id] for token_id in trajectory.response_token_ids]
    expected = [1] * QUESTION_TOKENS + [0] + [1] * ANSWER_TOKENS
    assert trajectory.loss_mask.tolist() == expected
    hidden, answer = words[QUESTION_TOKENS], words[QUESTION_TOKENS + 1 :]
    assert trajectory.reward == fmean(character in CLASSES[hidden] for character in answer)


async def test_each_session_is_rewarded_for_its_second_turn(
    tiny_dense: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few, size, steps = 4, 3, 2
    config = configured(tiny_dense, workers__engine="fake", prompts="none", reward__function=REWARD, window__size=1)
    async with running(config) as handle, dora.Trainer(handle.address, token=handle.token) as trainer:
        options = argparse.Namespace(address=handle.address, prompts=few * steps, group_size=size)
        environment = asyncio.create_task(run(options, handle.token))
        taken = await train(handle, trainer, steps=steps, groups=few)
        await environment
    check_promises(taken, window=1, groups=few)
    trajectories = [each for step in taken for group in step for each in group.trajectories]
    for each in trajectories:
        check_session(each)
    assert len({each.response_token_ids[QUESTION_TOKENS] for each in trajectories}) > 1, "prompts hide several classes"
    assert f"{few * size * steps} sessions, mean reward" in capsys.readouterr().out


@pytest.mark.full  # two minutes for each window, with vLLM
@pytest.mark.e2e
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("window", "steps"), [(1, 24), (3, 48)])
async def test_a_tiny_model_learns_to_use_the_answer(tmp_path: Path, tiny_dense: Path, window: int, steps: int) -> None:
    record = tmp_path / "record"
    settings = {
        "model": str(tiny_dense), "prompts": "none", "reward.function": REWARD, "record": str(record),
        "window.size": window, "workers.count": 2, "workers.slots": 32, "workers.kv_tokens": 16384,
        "workers.max_model_len_tokens": 256, "rollout.max_tokens": 16, "kv.pool_mb": 0,
    }  # fmt: skip
    service = Killed(tmp_path, settings)
    await service.start()
    arguments = ["--address", service.address, "--groups", str(GROUPS), "--lr", "3e-3"]
    log = tmp_path / "trainer.log"
    try:
        async with TrainerProcess(arguments, service.token, 1, log, tmp_path / "trained.jsonl") as trainer:
            environment = await started(service, steps * GROUPS, tmp_path / "environment.log")
            try:
                assert await trainer.run() == 0, trainer.last_words()
                assert await environment.wait() == 0, (tmp_path / "environment.log").read_text()
            finally:
                await killed(environment)
    finally:
        await service.stop()
    rewards: dict[int, list[float]] = defaultdict(list)
    for each in read_trajectories(record / TRAJECTORIES_FILE):
        check_session(each)
        rewards[each.trained_step].append(each.reward)
    assert [len(rewards[step]) for step in range(steps)] == [GROUPS * GROUP_SIZE] * steps
    quarter = steps // 4
    first, last = (fmean(fmean(rewards[step]) for step in part) for part in (range(quarter), range(steps)[-quarter:]))
    assert first < 1.5 * IGNORED and last > 2 * IGNORED, (first, last)
    report = verify(record, window_versions=window)
    assert report.ok and report.recomputed == steps * GROUPS * GROUP_SIZE, report


async def started(service: Killed, prompts: int, log: Path) -> asyncio.subprocess.Process:
    """The example as a process of its own."""
    argv = [str(ROOT / "examples" / "two_turns.py"), "--address", service.address]
    argv += ["--prompts", str(prompts), "--group-size", str(GROUP_SIZE)]
    environment = {**os.environ, "DORA_TOKEN": service.token}
    with log.open("wb") as sink:
        return await asyncio.create_subprocess_exec(sys.executable, *argv, env=environment, stdout=sink, stderr=sink)


async def killed(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()
