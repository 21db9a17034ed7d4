"""Runs in ``.venv-verl``: ``examples/verl_rollout.py`` with verl's registries, TransferQueue and replay buffer.

Its arguments are a model folder, and settings of verl. It writes one JSON object.
"""

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from safetensors.torch import load_file
from verl.checkpoint_engine import CheckpointEngineManager
from verl.experimental.agent_loop import AgentLoopManager
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.import_utils import load_class_from_fqn
from verl.workers.rollout import BaseRollout, get_rollout_class
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.replica import RolloutReplica

GROUPS = 2
FIELDS = ["prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores", "position_ids", "extra_fields"]


def config_of(model: str, settings: list[str]) -> Any:
    """verl's whole configuration, with the page's settings."""
    rollout = {
        "n": 2,
        "response_length": 8,
        "val_kwargs.n": 2,
        "val_kwargs.do_sample": True,
        "val_kwargs.temperature": 1,
    }
    given = [f"actor_rollout_ref.rollout.{name}={value}" for name, value in rollout.items()]
    given += [f"actor_rollout_ref.model.path={model}", f"data.train_batch_size={GROUPS}", "trainer.n_gpus_per_node=1"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", [*settings, *given])


def submit(manager: AgentLoopManager, step: int, partition: str) -> None:
    """As verl's trainer does with a batch of its data set."""
    names = [f"{partition}{step}g{index}" for index in range(GROUPS)]
    chats = np.empty(GROUPS, dtype=object)
    chats[:] = [[{"role": "user", "content": "LATE"}]] * GROUPS
    columns = {"raw_prompt": chats, "uid": np.array(names, dtype=object), "index": np.arange(GROUPS)}
    graded = {"reward_model": np.array([{"ground_truth": "nop"}] * GROUPS, dtype=object)}
    batch = tu.get_tensordict({**columns, **graded, "data_source": np.array(["letters"] * GROUPS, dtype=object)})
    tu.assign_non_tensor_data(batch, "global_steps", step)
    if partition == "val":
        tu.assign_non_tensor_data(batch, "validate", True)
    tags = [{"is_prompt": True, "status": "pending", "global_steps": step}] * GROUPS
    tq.kv_batch_put(keys=names, partition_id=partition, tags=tags)
    manager.generate_sequences(batch)


def sampled(buffer: ReplayBuffer, step: int, partition: str) -> list[dict[str, Any]]:
    """The responses that verl trains on."""
    batch, _ = buffer.sample(global_steps=step, partition_id=partition, batch_size=GROUPS)
    data = tq.kv_batch_get(keys=batch.keys, partition_id=partition, select_fields=FIELDS)
    rows = []
    for index, (key, tag) in enumerate(zip(batch.keys, batch.tags, strict=True)):
        row = {name: data[name][index].tolist() for name in FIELDS if isinstance(data[name], torch.Tensor)}
        rows.append({**row, "key": key, "tag": tag, "extra_fields": dict(data["extra_fields"][index])})
    tq.kv_clear(keys=batch.keys, partition_id=partition)
    return rows


def scaled(weights: dict[str, torch.Tensor], factor: float) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((name, tensor * factor) for name, tensor in weights.items())


def main() -> None:
    """In the order of verl's task runner."""
    folder, *settings = sys.argv[1:]
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    config = config_of(folder, settings)
    tq.init(OmegaConf.merge(config.transfer_queue, {"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    engine = get_rollout_class(rollout.name, rollout.mode)(config=rollout, model_config=model, device_mesh=None)
    ranks = SimpleNamespace(world_size=1, workers=[engine])  # in place of verl's workers, which need GPUs
    servers = LLMServerManager.create(config=config, worker_group=ranks)
    checkpoints = CheckpointEngineManager(
        omega_conf_to_dataclass(rollout.checkpoint_engine), actor_wg=ranks, replicas=servers.get_replicas()
    )
    checkpoints.sleep_replicas()
    weights = load_file(f"{folder}/model.safetensors")
    asyncio.run(engine.update_weights(scaled(weights, 1.0), global_steps=0))  # verl's first, before any batch
    kind = load_class_from_fqn(rollout.agent.agent_loop_manager_class, "AgentLoopManager")
    manager = kind.create(config=config, llm_client=servers.get_client())
    sampler = {"poll_interval": 0.05, "sampler_kwargs": {}, "max_off_policy_strategy": "drop"}
    threshold = config.trainer.v1.sampler.max_off_policy_threshold
    buffer = ReplayBufferAsync(config.trainer.v1.trainer_mode, config, max_off_policy_threshold=threshold, **sampler)
    steps = []
    for step in (1, 2):
        submit(manager, step, "train")
        steps.append(sampled(buffer, step, "train"))
        checkpoints.abort_replicas()
        checkpoints.sleep_replicas()
        asyncio.run(engine.update_weights(scaled(weights, 1.0 + step / 8), global_steps=step))
        checkpoints.resume_generation_replicas()
    submit(manager, 2, "val")
    found = {
        "is_engine": isinstance(engine, BaseRollout),
        "are_replicas": all(isinstance(each, RolloutReplica) for each in servers.get_replicas()),
        "is_manager": isinstance(manager, AgentLoopManager),
        "steps": steps,
        "evaluated": sampled(buffer, 2, "val"),
    }
    print(json.dumps(found, default=str))


if __name__ == "__main__":
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    main()
