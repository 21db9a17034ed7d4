"""TRL's GRPOTrainer on rollouts of a service: through its ``rollout_func``, with a commit after each generation.

    with Rollouts("127.0.0.1:7070", groups=16, token=os.environ["DORA_TOKEN"]) as rollouts:
        trainer = GRPOTrainer(
            str(rollouts.model), rollouts.rewards, rollout_func=rollouts, callbacks=[rollouts.commits], ...
        )
        trainer.train()

The service draws the prompts and computes the rewards, as for every trainer: ``train_dataset`` only sets the number of
steps. A generation of TRL is one step of the service, and its prompt groups are those that have finished. Models of
peft are published with their adapters merged. One process trains. Written against TRL 1.16.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Self

import trl
from transformers import TrainerCallback

import dora.sync
from dora.data.trajectory import TrajectoryGroup
from dora.errors import Conflict, InvalidValue, VersionRejected
from dora.trainers.lora import is_adapted, merged

_REWARD: Final = "dora_reward"  # the column of TRL's inputs that holds the service's reward


class GRPOTrainer(trl.GRPOTrainer):
    """TRL's trainer, with ratios to the policy that sampled.

    TRL takes rollouts of a ``rollout_func`` for those of the present policy, so its ratios would be 1 and its clip
    without effect. Here they are ratios to the recorded log probabilities, whatever the staleness of a response.
    """

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = super()._generate_and_score_completions(inputs)
        found["old_per_token_logps"] = found["sampling_per_token_logps"]
        return found


class Rollouts:
    """A ``rollout_func`` of TRL.

    ``groups`` is the number of prompt groups in a step, 0 for the service's; other ``options`` are those of
    ``dora.Trainer``.
    """

    def __init__(self, address: str, *, groups: int = 0, **options: Any) -> None:
        self.commits = _Commits(self)
        self._groups = groups
        self._client = dora.sync.Trainer(address, **{"name": "trl", **options})
        self._steps: Iterator[dora.sync.Step] = iter(())
        self._step: dora.sync.Step | None = None  # the next one, or the one whose groups TRL trains on
        self._updates = 0  # optimizer steps until the step is committed
        self._reward = 0.0  # mean of the step's valid rewards

    def __enter__(self) -> Self:
        self._client.open()
        return self

    def __exit__(self, *exception: object) -> None:
        self._client.__exit__(*exception)

    @property
    def model(self) -> Path:
        """The folder of the service's newest version, with its tokenizer. Raises Conflict on another host."""
        attachment = self._client.attach(groups=self._groups)
        if attachment.store_folder is None:
            raise Conflict("model", attachment.model, "a copy of the newest weights", "is on the service's host")
        return attachment.store_folder / "versions" / str(attachment.next_step)

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Takes one step's groups, ``num_generations`` responses each. The ``prompts`` only give their number.

        Raises InvalidValue for arguments that the service's rollouts cannot follow.
        """
        self._updates = _updates_of(trainer)
        size, count = trainer.num_generations, len(prompts)
        step = self._step or self._first()
        if count != size * self._client.attachment.groups_per_step:
            allowed = (
                f"args.num_generations times the service's {self._client.attachment.groups_per_step} groups a step"
            )
            raise InvalidValue("args.generation_batch_size", count, allowed)
        groups = list(iter(lambda: self._published(lambda: next(step, None), trainer.model), None))
        rows = [row for group in groups for row in _rows(group, size)]
        rewards = [row[_REWARD] for row in rows if row[_REWARD] is not None]
        self._reward = sum(rewards) / max(len(rewards), 1)
        rows += [{**row, "env_mask": [0] * len(row["env_mask"])} for row in _repeated(rows[:size], count - len(rows))]
        return {name: [row[name] for row in rows] for name in rows[0]}

    def rewards(self, completions: list[Any], **columns: Any) -> list[float | None]:
        """Returns the service's rewards, as TRL's reward function; None where the service's own failed."""
        return columns[_REWARD]

    def committed(self, model: Any, state: Any, control: Any) -> None:
        """Commits the service's step after an optimizer step, if it was the last one on its groups."""
        self._updates -= 1
        if self._updates or self._step is None:
            return
        weights, step = _weights_of(model), self._step
        self._published(lambda: step.commit(weights, metrics={"reward": self._reward}), model)
        if state.global_step < state.max_steps:
            self._step = self._published(lambda: next(self._steps, None), model)
            control.should_training_stop = control.should_training_stop or self._step is None

    def _first(self) -> dora.sync.Step:
        self._client.attach(groups=self._groups)
        self._steps = self._client.steps()
        self._step = next(self._steps, None)
        if self._step is None:
            raise Conflict("prompts", "none", "those of a new service", "are left")
        return self._step

    def settle(self, model: Any) -> None:
        """Waits for the last commit."""
        self._published(self._client.settled, model)

    def _published(self, call: Any, model: Any) -> Any:
        """Returns call(). Publishes a rejected version again once; a second rejection is raised."""
        try:
            return call()
        except VersionRejected as rejected:
            self._client.republish(_weights_of(model), version=rejected.version)
            return call()


class _Commits(TrainerCallback):
    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._rollouts.committed(kwargs["model"], state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._rollouts.settle(kwargs["model"])


def _updates_of(trainer: Any) -> int:
    """Counts optimizer steps on a generation. Raises InvalidValue for arguments that do not go with the service."""
    args = trainer.args
    if not isinstance(trainer, GRPOTrainer):
        raise InvalidValue("rollout_func", type(trainer).__name__, "given to dora.trainers.trl.GRPOTrainer")
    if not trainer.model.training:
        raise InvalidValue("args.eval_strategy", args.eval_strategy, "'no': dora eval measures versions")
    if args.world_size != 1:
        raise InvalidValue("args.world_size", args.world_size, "1: with rollout_func of dora, one process trains")
    if args.temperature != 1.0:
        allowed = "1.0: logprobs are recorded before temperature, which the service's rollout.temperature sets"
        raise InvalidValue("args.temperature", args.temperature, allowed)
    updates, rest = divmod(args.steps_per_generation * args.num_iterations, args.gradient_accumulation_steps)
    if rest:
        allowed = "a divisor of steps_per_generation * num_iterations, so that a commit contains a whole step"
        raise InvalidValue("args.gradient_accumulation_steps", args.gradient_accumulation_steps, allowed)
    return updates


def _rows(group: TrajectoryGroup, size: int) -> Iterator[dict[str, Any]]:
    if len(group.trajectories) != size:
        allowed = f"{len(group.trajectories)}, as the service's rollout.group_size"
        raise InvalidValue("args.num_generations", size, allowed)
    for each in group.trajectories:
        yield {
            "prompt_ids": list(each.prompt_token_ids),
            "completion_ids": list(each.response_token_ids),
            "logprobs": [float(value) for value in each.logprobs],
            "env_mask": [int(value) for value in each.loss_mask],
            _REWARD: float(each.reward) if each.reward_valid else None,
        }


def _repeated(rows: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Repeats rows to complete the last, short step: TRL needs a full one."""
    return [rows[index % len(rows)] for index in range(count)]


def _weights_of(model: Any) -> Any | Mapping[str, Any]:
    return merged(model) if is_adapted(model) else model
