"""Tinker's own client 0.38 samples from a service while it trains: what it gets is what the trainer gets."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import pytest

import dora
from dora.agents.front.child import FrontProcess
from dora.agents.front.protocols.tinker import sample_pb2 as pb
from dora.agents.front.run import FrontOptions, front
from dora.data.trajectory import Trajectory
from dora.ops.verify.check import verify
from dora.system.process_tree import descendants
from tests.clients.environments import run_in
from tests.service import check_promises, configured, during, running, train
from tests.unit.front_service import front as fake_front

FOLDER: Final = Path(__file__).parent
PROMPTS: Final = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
SAMPLES: Final = 2
Sampled = tuple[list[int], list[int], list[float]]  # prompt, tokens, logprobs


async def samples(url: str, **asked: Any) -> dict[str, Any]:
    """Runs the client, and returns what it printed."""
    variables = {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-any"}
    printed = await run_in("tinker", FOLDER / "tinker_samples.py", json.dumps(asked), variables=variables)
    found: dict[str, Any] = json.loads(printed)
    return found


def sampled(found: dict[str, Any]) -> list[Sampled]:
    return [
        (prompt, each["tokens"], each["logprobs"])
        for prompt, group in zip(PROMPTS, found["samples"], strict=True)
        for each in group
    ]


def delivered(trajectory: Trajectory) -> Sampled:
    logprobs = np.asarray(trajectory.logprobs, np.float32).tolist()
    return trajectory.prompt_token_ids.tolist(), trajectory.response_token_ids.tolist(), logprobs


async def sample_and_train(model: Path, **settings: Any) -> tuple[list[Sampled], list[Any]]:
    """Two clients, one after the other, sample a group for each prompt. The trainer takes a step of each client's."""
    config = configured(
        model,
        prompts="none",
        reward__function="tests.unit.reward_functions:process_id",
        window__size=3,
        rollout__max_tokens=8,
        **settings,
    )
    async with (
        running(config) as handle,
        front(FrontOptions(handle.address, handle.token, "127.0.0.1:0", model=model)) as url,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):

        async def work() -> list[Sampled]:
            asked: dict[str, Any] = {"prompts": PROMPTS, "num_samples": SAMPLES, "params": {"max_tokens": 6}}
            found = [await samples(url, **asked), await samples(url, **asked)]
            assert all(len({each["id"] for group in one["samples"] for each in group}) == 6 for one in found)
            assert found[0]["models"] == [found[0]["base_model"]] == [str(model)]
            return [each for one in found for each in sampled(one)]

        working = asyncio.create_task(work())
        steps, seen = await asyncio.gather(train(handle, trainer, steps=2, groups=len(PROMPTS)), working)
    check_promises(steps, window=3, groups=len(PROMPTS))
    return seen, steps


def check(seen: list[Sampled], steps: list[Any]) -> None:
    trajectories = [each for step in steps for group in step for each in group.trajectories]
    assert sorted(map(delivered, trajectories)) == sorted(seen)
    assert all(each.reward_valid and each.group_size == SAMPLES for each in trajectories)


async def test_what_the_client_gets_is_what_the_trainer_gets(tiny_dense: Path) -> None:
    check(*await sample_and_train(tiny_dense, workers__engine="fake"))


async def scored(model: Path, **settings: Any) -> list[tuple[list[int], list[float | None]]]:
    """Prompts and their logprobs: those that come with samples, all, and those of the last token."""
    config = configured(
        model,
        prompts="none",
        reward__function="tests.unit.reward_functions:process_id",
        window__size=3,
        rollout__max_tokens=8,
        **settings,
    )
    options = {"include_prompt_logprobs": True}
    asked: dict[str, Any] = {"prompts": PROMPTS, "num_samples": SAMPLES, "params": {"max_tokens": 6}}
    async with (
        running(config) as handle,
        front(FrontOptions(handle.address, handle.token, "127.0.0.1:0", model=model)) as url,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        training = train(handle, trainer, steps=3, groups=len(PROMPTS))
        found, _ = await asyncio.gather(samples(url, **asked, options=options, scored=PROMPTS), training)
    with_samples = [
        (prompt, each[0]["prompt_logprobs"]) for prompt, each in zip(PROMPTS, found["samples"], strict=True)
    ]
    return with_samples + list(zip([each for each in PROMPTS for _ in range(2)], found["scored"], strict=True))


async def test_prompts_are_scored(tiny_dense: Path) -> None:
    """Each version has logprobs of its own, and a step has been committed between two of them."""
    for number, (prompt, found) in enumerate(await scored(tiny_dense, workers__engine="fake")):
        is_last_alone = number >= len(PROMPTS) and (number - len(PROMPTS)) % 2
        without = len(prompt) - 1 if is_last_alone else 1
        assert len(found) == len(prompt)
        assert [each is None for each in found] == [place < without for place in range(len(prompt))]


@pytest.mark.full
async def test_the_logprobs_of_a_prompt_are_the_models(tiny_dense: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_dense, dtype=torch.float32).eval()
    for prompt, found in await scored(tiny_dense):
        with torch.inference_mode():
            logprobs = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        pairs = [(ours, theirs) for ours, theirs in zip(found[1:], expected.tolist(), strict=True) if ours is not None]
        assert pairs and np.abs(np.subtract(*zip(*pairs, strict=True))).max() < 1e-4


@pytest.mark.full
async def test_every_logprob_that_the_client_gets_is_the_models(tiny_dense: Path, tmp_path: Path) -> None:
    check(*await sample_and_train(tiny_dense, record=str(tmp_path / "record")))
    report = verify(tmp_path / "record")
    assert report.recomputed and report.ok, report


@pytest.mark.full  # a front is started twice
async def test_a_client_goes_on_when_its_front_dies(tiny_dense: Path) -> None:
    """Its requests wait for the next front, which knows none of its futures: what was under way is sampled anew."""
    config = configured(
        tiny_dense,
        workers__engine="fake",
        prompts="none",
        reward__function="tests.unit.reward_functions:process_id",
        window__size=1,
        rollout__max_tokens=8,
    )
    steps: list[list[Any]] = []

    async def learn(trainer: dora.Trainer, process: FrontProcess) -> None:
        async for step in trainer.steps(groups=1):
            steps.append([group async for group in step])
            if len(steps) == 1:  # the window has no room for the other groups: their samples wait
                (child,) = [each for each in descendants() if "front" in psutil.Process(each).cmdline()]
                os.kill(child, signal.SIGKILL)
            await step.commit(weights=handle.model, wait=True)

    process = FrontProcess("127.0.0.1:0")
    async with running(config) as handle, dora.Trainer(handle.address, token=handle.token) as trainer:
        process.start(handle.address, handle.token, handle.model)
        try:
            learning = asyncio.create_task(learn(trainer, process))
            work = samples(process.url, prompts=PROMPTS, num_samples=SAMPLES, params={"max_tokens": 6})
            seen = sampled(await during(learning, work))
            learning.cancel()
        finally:
            await process.stop()
    assert len(seen) == SAMPLES * len(PROMPTS)
    found = [delivered(each) for (group,) in steps for each in group.trajectories]
    assert len({each.trajectory_id for (group,) in steps for each in group.trajectories}) == len(found)
    assert len([each for each in seen if each not in found]) <= SAMPLES, "those of the step that was not taken"


async def test_the_client_shows_what_is_refused() -> None:
    """The client ends at once with what to do: it repeats none of these for five minutes."""
    async with fake_front() as (url, service, _):
        for names, asked in (
            ("policy-v6, policy-v7", {"model_path": "tinker://run/sampler_weights/policy-v3"}),
            ("topk_prompt_logprobs", {"options": {"include_prompt_logprobs": True, "topk_prompt_logprobs": 2}}),
        ):
            found = await samples(url, prompts=[[5]], **asked)
            assert (found["error"], found["category"]) == ("BadRequestError", "user"), found
            assert names in found["message"]
    assert not service.openings


async def test_messages_are_those_of_the_client() -> None:
    found = json.loads(await run_in("tinker", FOLDER / "tinker_messages.py"))
    for name, message in pb.DESCRIPTOR.message_types_by_name.items():
        theirs = found["fields"][name]
        assert {each.name: theirs[each.name] for each in message.fields} == {
            each.name: [each.number, each.type] for each in message.fields
        }
    assert dict(pb.StopReason.items()) == found["stops"]
