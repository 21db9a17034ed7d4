"""verl's PPO trainer on rollouts of a service: the rollout engine ``dora``, for verl 0.9.1 (``trainer.use_v1``).

    VERL_USE_EXTERNAL_MODULES=verl_rollout PYTHONPATH=examples python -m verl.trainer.main_ppo \\
        actor_rollout_ref.rollout.name=dora \\
        +actor_rollout_ref.rollout.agent.agent_loop_manager_class=verl_rollout.Rollouts \\
        +actor_rollout_ref.rollout.engine_kwargs.dora.address=127.0.0.1:7070 \\
        trainer.v1.trainer_mode=colocate_async trainer.v1.sampler.max_off_policy_threshold=null ...

The token comes from the environment variable DORA_TOKEN of each node. The service (``--prompts none``) samples verl's
prompts and computes the rewards; each run of verl needs a service of its own. A step is a batch of verl, and the window
bounds the staleness. No GPU is used for rollouts. Each batch's weights are committed after its update.
"""

import asyncio
import contextlib
import json
import logging
import os
from typing import Any

import ray
import torch
import transfer_queue as tq
from verl.experimental.agent_loop.agent_loop import AgentLoopManager, AgentLoopMetrics, AgentLoopOutput
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

import dora
from dora.data.trajectory import Trajectory, TrajectoryGroup
from dora.errors import InvalidValue

ACTOR = "dora"  # the name of the Ray actor that holds the connection


class Service:
    """The connection, in one Ray actor: prompts come from verl's driver, weights from the first rank."""

    async def open(self, address: str, config: Any) -> None:
        tq.init()
        token = os.environ["DORA_TOKEN"]
        self._rollout, self._rows = config.actor_rollout_ref.rollout, {}
        self._prompts = dora.Prompts(address, token=token)
        self._trainer = dora.Trainer(address, token=token, name="verl")
        await contextlib.AsyncExitStack().enter_async_context(self._trainer)  # open until Ray ends the actor
        await self._trainer.attach(groups=config.data.train_batch_size)
        self._steps, self._step = self._trainer.steps(), None
        self._delivery = asyncio.create_task(self._deliver())
        self._evaluations: set[asyncio.Task[None]] = set()

    async def generate(self, rows: list[dict[str, Any]], validate: bool) -> None:
        """Submits prompts; their groups go to verl's TransferQueue as they finish."""
        self._rows |= {row["uid"]: row for row in rows}
        sampling = self._rollout.val_kwargs if validate else self._rollout
        prompts = [_prompt(row, sampling, self._rollout.response_length) for row in rows]
        if validate:
            task = asyncio.create_task(self._evaluate(prompts))
            self._evaluations.add(task)
            task.add_done_callback(self._evaluations.discard)
        else:
            await self._prompts.submit(prompts)

    async def commit(self, weights: dict[str, torch.Tensor]) -> None:
        """Commits the step whose groups verl has trained on; none before the first batch."""
        if self._step is None:
            return
        await self._delivery
        await self._step.commit(weights=weights, wait=True)
        self._step, self._delivery = None, asyncio.create_task(self._deliver())

    async def _deliver(self) -> None:
        """Puts the groups of one step. Its error ends the next commit, and with it verl's run."""
        try:
            async for step in self._steps:
                async for group in step:
                    self._step = step
                    await self._put(group, "train")
                return
        except Exception:
            logging.getLogger("dora").exception("no more groups of the service are delivered")
            raise

    async def _evaluate(self, prompts: list[dict[str, Any]]) -> None:
        async for group in self._prompts.evaluate(prompts):
            await self._put(group, "val")

    async def _put(self, group: TrajectoryGroup, partition: str) -> None:
        row = self._rows.pop(group.prompt_id)
        valid = [each.reward for each in group.trajectories if each.reward_valid]
        mean = sum(valid) / max(len(valid), 1)  # where the reward function failed: the advantage is 0
        fields = [_fields(each, row, each.reward if each.reward_valid else mean) for each in group.trajectories]
        keys = [f"{group.prompt_id}_{index}_0" for index in range(len(fields))]
        tags = [_tag(each, row) for each in group.trajectories]
        await tq.async_kv_batch_put(
            keys=keys, partition_id=partition, fields=list_of_dict_to_tensordict(fields), tags=tags
        )
        await tq.async_kv_put(key=group.prompt_id, partition_id=partition, tag={"status": "finished"})


class Rollouts(AgentLoopManager):
    """verl's ``agent_loop_manager_class``: a batch of prompts goes to the service."""

    async def _init_agent_loop_workers(self) -> None:
        if self.rollout_config.temperature != 1.0:
            allowed = "1.0: logprobs are recorded before temperature"
            raise InvalidValue("actor_rollout_ref.rollout.temperature", self.rollout_config.temperature, allowed)
        self.service = ray.remote(Service).options(name=ACTOR, num_cpus=0).remote()
        await self.service.open.remote(self.rollout_config.engine_kwargs["dora"]["address"], self.config)

    def generate_sequences(self, prompts: Any) -> None:
        """Returns at once. ``prompts`` is a batch of verl's data set, with ``validate`` for one of validation."""
        validate = "validate" in prompts and bool(prompts["validate"])
        columns = {name: prompts[name] for name in list(prompts.keys()) if name != "validate"}
        rows = [{name: _cell(column, index) for name, column in columns.items()} for index in range(len(prompts))]
        ray.get(self.service.generate.remote(rows, validate))


class Weights(base.BaseRollout):
    """A rank's rollout engine: the first rank commits the weights that all gather."""

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(self, weights: Any, wire_format: str = "named_tensors", **options: Any) -> None:
        if wire_format != "named_tensors" or options.get("peft_config"):
            raise ValueError("the service takes whole weights: set actor_rollout_ref.model.lora.merge=True")
        is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        tensors = {}
        for name, tensor in weights:  # gathered as it is asked for, so that each rank asks for all
            if is_first:
                tensors[name] = tensor.cpu()
        try:
            service = ray.get_actor(ACTOR)
        except ValueError:  # verl begins with an update, before it has a manager: no batch to commit
            return
        if is_first:
            await service.commit.remote(tensors)


class Replica(RolloutReplica):
    """No server: the service has the engines."""

    async def launch_servers(self) -> None:
        self._server_address = f"{ACTOR}-{self.replica_rank}"


def _prompt(row: dict[str, Any], sampling: Any, max_tokens: int) -> dict[str, Any]:
    """A row of verl's data set, as the service takes it. Its reward function gets verl's columns."""
    verifier = {name: row[name] for name in ("data_source", "reward_model", "extra_info") if name in row}
    values = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": max(sampling.top_k, 0)}
    return {
        "prompt_id": row["uid"],
        "messages": list(row["raw_prompt"]),
        "task_id": str(row.get("data_source", "")),
        "group_size": sampling.n,
        "sampling": {**values, "max_tokens": max_tokens},
        "verifier": json.loads(json.dumps(verifier, default=str)),
    }


def _fields(trajectory: Trajectory, row: dict[str, Any], reward: float) -> dict[str, Any]:
    """What verl's trainer reads of a response."""
    version = trajectory.behaviour_version  # weights of verl's global step of this number
    output = AgentLoopOutput(
        prompt_ids=list(trajectory.prompt_token_ids),
        response_ids=list(trajectory.response_token_ids),
        response_mask=list(trajectory.loss_mask),
        response_logprobs=[float(value) for value in trajectory.logprobs],
        reward_score=float(reward),
        num_turns=2,
        metrics=AgentLoopMetrics(),
        extra_fields={"min_global_steps": version, "max_global_steps": version, "reward_extra_info": {}},
    ).as_dict()
    tokens = torch.cat([output["prompts"], output["responses"]])
    rest = {"loss_mask": output["response_mask"], "input_ids": tokens, "position_ids": torch.arange(len(tokens))}
    return {**row, **output, **rest, "session_id": trajectory.sample_index, "multi_modal_inputs": {}}


def _tag(trajectory: Trajectory, row: dict[str, Any]) -> dict[str, Any]:
    prompt, response = len(trajectory.prompt_token_ids), len(trajectory.response_token_ids)
    lengths = {"prompt_len": prompt, "response_len": response, "seq_len": prompt + response}
    version = trajectory.behaviour_version
    steps = {"global_steps": row["global_steps"], "min_global_steps": version, "max_global_steps": version}
    return {"status": "success", **lengths, **steps}


def _cell(column: Any, index: int) -> Any:
    return column[index] if isinstance(column, torch.Tensor | list) else column


RolloutReplicaRegistry.register("dora", lambda: Replica)
base._ROLLOUT_REGISTRY["dora", "async"] = f"{__name__}.Weights"
