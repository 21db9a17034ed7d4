"""Runs a cell: samples with a policy that is ``lag`` steps old, trains, and measures how far the policy moved."""

import copy
import math
import random
from collections import deque
from collections.abc import Sequence
from itertools import islice
from statistics import fmean
from typing import Final

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from dora.client.replay import ReplayBuffer
from dora.data.trajectory import Trajectory, TrajectoryGroup
from dora.data.types import Prompt, SamplingParams, Segment
from dora.models import resolve_model
from dora.models.ends import end_token_ids
from dora.prompts.tokenizer import ChatTokenizer
from dora.trainers.learner import Learner, LearnerConfig
from dora.trainers.objectives.presets import objective
from experiments.staleness.cell import LEVEL_STEPS, TASKS, Cell
from experiments.staleness.sampling import Response, divergence, sampled, token_distributions

WINDOW: Final = 4  # versions, which bounds the staleness of replays
SIGNALS: Final = ("clip_fraction", "effective_sample", "ratio_p99", "entropy", "grad_norm")


class Lagged:
    """One cell's run. Deterministic: all randomness follows from the seed."""

    def __init__(self, cell: Cell) -> None:
        self.cell, self.task = cell, TASKS[cell.task]
        folder = resolve_model(self.task.model)
        self.tokenizer = ChatTokenizer(folder)
        self._ends = end_token_ids(folder)
        self._prompts = self.task.source(self.tokenizer, cell.seed)
        self._generator = torch.Generator().manual_seed(cell.seed)
        module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
        self._sampler = copy.deepcopy(module).eval()
        if self.task.layers:
            module.requires_grad_(False)
            module.get_decoder().layers[-self.task.layers :].requires_grad_(True)
        goal = objective(cell.objective)
        self._learner = Learner(module, LearnerConfig(learning_rate=cell.learning_rate, objective=goal))
        self._replay = ReplayBuffer(cell.replay, cell.replay_by) if cell.replay else None
        self._versions: deque[dict[str, torch.Tensor]] = deque([self._trained()], maxlen=cell.lag + 1)

    def steps(self) -> list[dict[str, float]]:
        """Trains until the level is reached, or for all steps. One line a step; ``reward``: of version step - lag."""
        lines: list[dict[str, float]] = []
        for step in range(self.cell.steps + self.cell.lag):
            lines.append(self._step(step))
            own = [line["reward"] for line in lines[self.cell.lag :]]
            if len(own) >= LEVEL_STEPS and fmean(own[-LEVEL_STEPS:]) >= self.task.level:
                break
        return lines

    def _step(self, step: int) -> dict[str, float]:
        version = max(0, step - self.cell.lag)
        self._sampler.load_state_dict(self._versions[0], strict=False)
        prompts = list(islice(self._prompts.starting_at(step * self.task.groups), self.task.groups))
        rows = [prompt for prompt in prompts for _ in range(self.task.group_size)]
        token_ids = [list(prompt.token_ids) for prompt in rows]
        limits = [self.task.max_tokens] * len(rows)
        responses = sampled(self._sampler, token_ids, limits, self._ends, self._generator)
        groups = self._groups(step, version, prompts, responses)
        self._take(step, groups)
        probed = random.Random(f"probe {self.cell.seed} {step}").sample(range(len(rows)), self.task.probed)
        probe = [token_ids[row] for row in probed], [responses[row] for row in probed]
        before = token_distributions(self._learner.module, *probe)
        numbers = self._learner.finish_step().numbers()
        movement = divergence(before, token_distributions(self._learner.module, *probe))
        self._versions.append(self._trained())
        reward = fmean(each.reward for group in groups for each in group.trajectories)
        line = {"reward": reward, "movement": movement, **{name: numbers.get(name, math.nan) for name in SIGNALS}}
        return line if self._replay is None else {**line, "groups_replayed": numbers["groups_replayed"]}

    def _take(self, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        """Gives the learner the step's groups, and groups of earlier steps if the cell replays some."""
        replays = self._replay.begin(step, len(groups), WINDOW) if self._replay is not None else ()
        for group in replays:
            self._learner.add_group(group, is_replay=True)
        for group in groups:
            self._learner.add_group(group)
            if self._replay is not None:
                self._replay.add(group)

    def _groups(
        self, step: int, version: int, prompts: Sequence[Prompt], responses: Sequence[Response]
    ) -> list[TrajectoryGroup]:
        size = self.task.group_size
        return [
            TrajectoryGroup(
                f"g{step}.{index}",
                tuple(
                    self._trajectory(f"g{step}.{index}", step, version, member, prompt, response)
                    for member, response in enumerate(responses[index * size : (index + 1) * size])
                ),
            )
            for index, prompt in enumerate(prompts)
        ]

    def _trajectory(
        self, group_id: str, step: int, version: int, member: int, prompt: Prompt, response: Response
    ) -> Trajectory:
        tokens = len(response.token_ids)
        text = self.tokenizer.decode(response.token_ids)
        return Trajectory(
            trajectory_id=f"{group_id}.{member}", group_id=group_id, prompt_id=prompt.prompt_id, task_id=prompt.task_id,
            sample_index=member, group_size=self.task.group_size, behaviour_version=version, reference_version=0,
            trained_step=step, staleness=step - version, prompt_token_ids=np.array(prompt.token_ids, np.int32),
            response_token_ids=np.array(response.token_ids, np.int32), logprobs=np.array(response.logprobs, np.float32),
            loss_mask=np.ones(tokens, np.uint8),
            sampling=SamplingParams(max_tokens=self.task.max_tokens),
            reward=self.task.reward(prompt, text, response.token_ids), reward_valid=True, reward_components={},
            verifier_log="", finish_reason="stop" if response.has_ended else "length", started_at=0.0, finished_at=0.0,
            worker_history=(Segment("sampler", 0, tokens - 1, "new", version),), length_tokens=tokens,
        )  # fmt: skip

    def _trained(self) -> dict[str, torch.Tensor]:
        """A copy of the weights that training changes."""
        named = self._learner.module.named_parameters()
        return {name: each.detach().clone() for name, each in named if each.requires_grad}
