"""Runs in ``.venv-skyrl``: ``examples/skyrl_generator.py`` with SkyRL's own preparation and checks of batches.

Its arguments are a model folder and the address of a service. It writes one JSON object.
"""

import asyncio
import json
import os
import sys
import tempfile
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import typing_extensions
from safetensors.torch import load_file, save_file

typing.TypedDict = typing_extensions.TypedDict  # what pydantic needs of SkyRL's types before Python 3.12

from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_vllm_sampling_params  # noqa: E402
from skyrl.train.config import SamplingParams  # noqa: E402
from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer  # noqa: E402
from skyrl.train.generators.base import GeneratorInterface  # noqa: E402
from skyrl.train.generators.utils import (  # noqa: E402
    get_metrics_from_generator_output,
    prepare_generator_input,
)
from skyrl.train.trainer import RayPPOTrainer  # noqa: E402
from skyrl.train.utils.trainer_utils import validate_generator_output  # noqa: E402

from dora.errors import InvalidValue  # noqa: E402
from examples.skyrl_generator import AsyncTrainer, Experiment, Generator, Trainer  # noqa: E402

SAMPLING = get_vllm_sampling_params(SamplingParams(max_generate_length=8))  # what SkyRL's trainers pass
SIZE = 2  # of groups, and groups of a step


class Models:
    """In place of SkyRL's workers, which need GPUs: it writes scaled weights."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights, self.saved = weights, 0

    def save_hf_model(self, model: str, folder: str, tokenizer: object) -> None:
        scaled = {name: tensor * (1.0 + self.saved / 8) for name, tensor in self.weights.items()}
        save_file(scaled, Path(folder) / f"{model}.safetensors")
        self.saved += 1


async def batch(generator: GeneratorInterface, step: int, phase: str, rows: tuple[int, ...] = (0, 1)) -> dict[str, Any]:
    """As SkyRL's trainers do with rows of a data set, whose ids repeat."""
    chat, extras = [{"role": "user", "content": "LATE"}], {"reward_spec": {"ground_truth": "nop"}}
    prompts = [{"prompt": chat, "env_class": None, "env_extras": extras, "uid": str(row)} for row in rows]
    given, uids = prepare_generator_input(prompts, SIZE, SAMPLING, "none", phase, step)
    output = await generator.generate(given)
    validate_generator_output(len(given["prompts"]), output)
    assert [each.to_string() for each in output["trajectory_ids"]] == [
        f"{row}_{each}" for row in rows for each in (0, 1)
    ]
    return {**output, "trajectory_ids": uids, "score": get_metrics_from_generator_output(output, uids)["avg_score"]}


async def refused(generator: GeneratorInterface) -> str:
    """The field of the refusal of another temperature than 1."""
    rows = [{"prompt": [{"role": "user", "content": "LATE"}], "env_class": None, "env_extras": {}, "uid": "0"}]
    given, _ = prepare_generator_input(rows, 1, {**SAMPLING, "temperature": 0.7}, "none", "train", 1)
    try:
        await generator.generate(given)
    except InvalidValue as error:
        return error.field
    return ""


async def run(folder: str, address: str) -> dict[str, Any]:
    """Two steps by batches, as the synchronous trainer asks for them; one by groups, as the asynchronous one does."""
    os.environ["DORA_ADDRESS"] = address
    experiment = object.__new__(Experiment)  # its constructor reads data sets
    cfg = SimpleNamespace(trainer=SimpleNamespace(train_batch_size=SIZE, export_path=tempfile.gettempdir()))
    generator = experiment.get_generator(cfg, None, experiment.get_inference_client())
    trainer = object.__new__(Trainer)  # its constructor reads the whole configuration
    trainer.cfg, trainer.tokenizer, trainer.generator = cfg, None, generator
    trainer.dispatch = Models(load_file(f"{folder}/model.safetensors"))
    trainer.init_weight_sync_state()
    await trainer.dispatch.save_weights_for_sampler()  # SkyRL's first, before any batch
    steps = []
    for step in (1, 2):
        steps.append(await batch(generator, step, "train"))
        await trainer.dispatch.save_weights_for_sampler()
    groups = await asyncio.gather(*(batch(generator, 3, "train", (row,)) for row in (0, 1)))
    await trainer.dispatch.save_weights_for_sampler()
    evaluated = await batch(generator, 3, "eval")
    return {
        "is_generator": isinstance(generator, GeneratorInterface) and type(generator) is Generator,
        "is_trainer": isinstance(trainer, RayPPOTrainer) and issubclass(AsyncTrainer, FullyAsyncRayPPOTrainer),
        "refused": await refused(generator),
        "steps": steps,
        "groups": groups,
        "evaluated": evaluated,
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(*sys.argv[1:])), default=str))
