"""SkyRL's trainers on rollouts of a service, through its ``GeneratorInterface``, for SkyRL 0.4.0.

    python examples/skyrl_generator.py trainer.placement.colocate_all=false generator.n_samples_per_prompt=8 ...

The arguments are SkyRL's. The service's address and token come from DORA_ADDRESS and DORA_TOKEN. The service
(``--prompts none``) samples SkyRL's prompts and computes the rewards: its step is a batch of SkyRL, and its window
bounds the staleness. No GPU is used for rollouts. Each batch's weights are committed after its update.
"""

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

import ray
import torch
from safetensors.torch import load_file
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer
from skyrl.train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils import validate_cfg
from skyrl.train.utils.utils import initialize_ray

import dora
from dora.data.trajectory import Trajectory, TrajectoryGroup
from dora.errors import InvalidValue

OF_ENGINES = ("logprobs", "skip_special_tokens", "include_stop_str_in_output")  # of replies: the service has its own


class Generator(GeneratorInterface):
    """SkyRL's generator. ``groups`` is the number of prompts that SkyRL trains on in a step."""

    def __init__(self, address: str, token: str, groups: int) -> None:
        self._prompts, self._trainer = (
            dora.Prompts(address, token=token),
            dora.Trainer(address, token=token, name="skyrl"),
        )
        self._groups, self._waiting = groups, dict[str, asyncio.Future[TrajectoryGroup]]()
        self._step: dora.Step | None = None
        self._delivery: asyncio.Task[None] | None = None

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Samples a batch, or one group for SkyRL's asynchronous trainer. Responses are in the order of the batch."""
        rows = list(zip(input_batch["trajectory_ids"], input_batch["prompts"], input_batch["env_extras"], strict=True))
        counts: dict[str, int] = {}
        for each, _, _ in rows:
            counts[each.instance_id] = counts.get(each.instance_id, 0) + 1
        names = {uid: f"{uid}-{uuid.uuid4().hex}" for uid in counts}  # SkyRL repeats its ids in each epoch
        prompts = {
            each.instance_id: _prompt(names[each.instance_id], chat, extras, counts[each.instance_id], input_batch)
            for each, chat, extras in rows
        }
        if input_batch["batch_metadata"].training_phase == "eval":
            groups = [group async for group in self._prompts.evaluate(list(prompts.values()))]
        else:
            groups = await self._trained(list(prompts.values()))
        found = {group.prompt_id: group for group in groups}
        members = {uid: iter(_members(found[name])) for uid, name in names.items()}
        return _output([(each, *next(members[each.instance_id])) for each, _, _ in rows])

    async def commit(self, weights: dict[str, torch.Tensor]) -> None:
        """Commits the step whose groups SkyRL has trained on; none before the first batch."""
        if self._step is None or self._delivery is None:
            return
        await self._delivery
        await self._step.commit(weights=weights, wait=True)
        self._step, self._delivery = None, asyncio.create_task(self._deliver())

    async def _trained(self, prompts: list[dict[str, Any]]) -> list[TrajectoryGroup]:
        if self._delivery is None:
            await contextlib.AsyncExitStack().enter_async_context(self._trainer)  # open until the process ends
            await self._trainer.attach(groups=self._groups)
            self._steps = self._trainer.steps()
            self._delivery = asyncio.create_task(self._deliver())
        futures = [asyncio.get_running_loop().create_future() for _ in prompts]
        self._waiting |= {prompt["prompt_id"]: future for prompt, future in zip(prompts, futures, strict=True)}
        await self._prompts.submit(prompts)
        return list(await asyncio.gather(*futures))

    async def _deliver(self) -> None:
        """Passes on the groups of one step as they finish."""
        try:
            async for step in self._steps:
                async for group in step:
                    self._step = step
                    self._waiting.pop(group.prompt_id).set_result(group)
                return
        except Exception as error:
            for future in self._waiting.values():
                future.set_exception(error)
            raise


class _Commits:
    """What both trainers of SkyRL do in another way: their weights become versions of the service."""

    def init_weight_sync_state(self: Any) -> None:
        self.dispatch.save_weights_for_sampler = self._commit  # in place of the transfer to SkyRL's own engines

    async def _commit(self: Any, model_id: str | None = None) -> None:
        with tempfile.TemporaryDirectory(dir=self.cfg.trainer.export_path) as folder:  # seen by the first rank's node
            await asyncio.to_thread(self.dispatch.save_hf_model, "policy", folder, self.tokenizer)
            await self.generator.commit(weights_of(folder))


class Trainer(_Commits, RayPPOTrainer):
    """SkyRL's synchronous trainer."""


class AsyncTrainer(_Commits, FullyAsyncRayPPOTrainer):
    """SkyRL's asynchronous trainer (``trainer.fully_async.enabled=true``), which asks for several steps' groups."""


class Experiment(BasePPOExp):
    """SkyRL's experiment, without inference engines."""

    def get_inference_client(self) -> Any:
        return None

    def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> GeneratorInterface:
        return Generator(os.environ["DORA_ADDRESS"], os.environ["DORA_TOKEN"], cfg.trainer.train_batch_size)

    def get_trainer(self, *args: Any, **options: Any) -> RayPPOTrainer:
        kind = AsyncTrainer if self.cfg.trainer.fully_async.enabled else Trainer
        return kind(*args, **options)


def weights_of(folder: str) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, in whatever dtype it has. The files are mapped, not read."""
    files = sorted(Path(folder).glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _prompt(name: str, chat: Any, extras: Any, count: int, batch: GeneratorInput) -> dict[str, Any]:
    """A prompt as the service takes it. Its reward function gets the other columns of SkyRL's data set."""
    given = {key: value for key, value in (batch["sampling_params"] or {}).items() if value is not None}
    sampling = {key: value for key, value in given.items() if key not in OF_ENGINES}
    if batch["batch_metadata"].training_phase == "train" and given.get("temperature", 1.0) != 1.0:
        raise InvalidValue("temperature", given["temperature"], "1.0: logprobs are recorded before temperature")
    return {
        "prompt_id": name,
        "messages": chat,
        "group_size": count,
        "sampling": {**sampling, "top_k": max(given.get("top_k", 0), 0)},  # the service refuses what it does not know
        "verifier": json.loads(json.dumps(extras or {}, default=str)),
    }


def _members(group: TrajectoryGroup) -> list[tuple[Trajectory, float]]:
    """The responses with their rewards. Where the reward function failed, it is the mean: the advantage is 0."""
    valid = [each.reward for each in group.trajectories if each.reward_valid]
    mean = sum(valid) / max(len(valid), 1)
    return [(each, each.reward if each.reward_valid else mean) for each in group.trajectories]


def _output(rows: list[tuple[Any, Trajectory, float]]) -> GeneratorOutput:
    responses = [each for _, each, _ in rows]
    versions = [each.behaviour_version for each in responses]
    staleness = sum(each.staleness for each in responses) / len(responses)
    metrics = {"dora/version_min": min(versions), "dora/version_max": max(versions), "dora/staleness": staleness}
    missing = ("rollout_expert_indices", "rollout_sample_support", "trajectory_time_splits", "is_last_step")
    return {
        "prompt_token_ids": [list(each.prompt_token_ids) for each in responses],
        "response_ids": [list(each.response_token_ids) for each in responses],
        "rewards": [float(reward) for _, _, reward in rows],
        "loss_masks": [list(each.loss_mask) for each in responses],
        "stop_reasons": [each.finish_reason for each in responses],
        "rollout_logprobs": [[float(value) for value in each.logprobs] for each in responses],
        "rollout_metrics": metrics,
        "trajectory_ids": [each for each, _, _ in rows],
        "trajectory_generation_times": [each.finished_at - each.started_at for each in responses],
        **dict.fromkeys((*missing, "env_metrics", "pixel_values", "image_grid_thw")),
    }


@ray.remote(num_cpus=1)
def run(cfg: SkyRLTrainConfig) -> None:
    Experiment(cfg).run()


if __name__ == "__main__":
    configuration = SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])
    validate_cfg(configuration)
    initialize_ray(configuration)
    ray.get(run.remote(configuration))
