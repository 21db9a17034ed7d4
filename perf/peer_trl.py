"""TRL's GRPOTrainer on the task of ``perf/peers.py``, in ``.venv-trl``.

    .venv-trl/bin/python -m perf.peer_trl FOLDER

:func:`trainer_of` is a user's program. The rest gives each response the length that the task asks for, which TRL has no
option for, and writes the record.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from dora.data.types import Prompt
from dora.models.tiny_vocabulary import CLASSES, EOS_ID
from perf.peer_record import RECORD_FOLDER, Prompts, Record, Response, Task, model_of, read_task, trajectories_of

ROWS_MOST: Final = 16  # in a micro-batch


def reward_of_characters(completions: Sequence[Any], characters: Sequence[str], **columns: Any) -> list[float]:
    """The task's reward, as TRL calls it."""
    texts = [each[0]["content"] for each in completions]
    return [
        sum(one in allowed for one in text) / max(len(text), 1) for text, allowed in zip(texts, characters, strict=True)
    ]


def trainer_of(task: Task, model: Any, rows: list[dict[str, Any]], out: Path) -> "Recorded":
    """A user's program: GRPO with the objective, optimiser and batch of the other peers."""
    rows_of_step = task.groups * task.group_size
    micro_batch = min(ROWS_MOST, rows_of_step)
    return Recorded(
        model=model,
        reward_funcs=reward_of_characters,
        train_dataset=Dataset.from_list(rows),
        args=GRPOConfig(
            output_dir=str(out),
            num_generations=task.group_size,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=rows_of_step // micro_batch,
            max_completion_length=task.longest_tokens,
            max_steps=task.steps,
            learning_rate=task.learning_rate,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            adam_beta2=0.999,
            loss_type="dapo",
            epsilon_high=0.28,
            beta=0.0,
            shuffle_dataset=False,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )


class Lengths(LogitsProcessor):
    """Ends each row of a batch at its length, as ``max_tokens`` with ``ignore_eos`` does in vLLM."""

    def __init__(self) -> None:
        self.of_rows: list[int] = []
        self.prompt_tokens = 0  # of every row of the batch, with padding

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ends = torch.tensor(self.of_rows) <= input_ids.shape[1] - self.prompt_tokens + 1
        scores = scores.clone()
        scores[~ends, EOS_ID] = -torch.inf
        scores[ends] = -torch.inf
        scores[ends, EOS_ID] = 0.0
        return scores

    def put_into(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        def with_lengths(input_ids: torch.Tensor, **arguments: Any) -> Any:
            self.prompt_tokens = input_ids.shape[1]
            return generate(input_ids=input_ids, logits_processor=LogitsProcessorList([self]), **arguments)

        return with_lengths


class Recorded(GRPOTrainer):
    """TRL's trainer, which keeps what it trains on. A generation is one step, and its version is the step's number."""

    lengths: Lengths
    record: Record
    prompts: Prompts

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self.lengths.of_rows = [row["max_tokens"] for row in inputs]
        found: dict[str, Any] = super()._generate_and_score_completions(inputs)
        step, size = self.state.global_step, self.num_generations
        for first in range(0, len(inputs), size):
            prompt = self.prompts[inputs[first]["index"]]
            rows = range(first, first + size)
            responses = [_response(found, row, step) for row in rows]
            rewards = [self.prompts.reward(prompt, each.token_ids) for each in responses]
            self.record.keep(trajectories_of(f"{step}/{first}", prompt, responses, rewards, step))
        return found


def _response(found: dict[str, Any], row: int, version: int) -> Response:
    """Without logprobs: transformers' generation records none."""
    length = int(found["completion_mask"][row].sum())
    token_ids = found["completion_ids"][row, :length].tolist()
    return Response(token_ids, [float("nan")] * length, [(version, 0, length - 1)])


class Commits(TrainerCallback):
    """Writes each step's time and weights."""

    def __init__(self, record: Record, limit_s: float) -> None:
        self._record, self._ends_s = record, time.monotonic() + limit_s

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"].save_pretrained(self._record.version_folder(0))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"].save_pretrained(self._record.version_folder(state.global_step))
        self._record.commit(state.global_step - 1)
        print(f"step {state.global_step - 1}", flush=True)
        control.should_training_stop |= time.monotonic() > self._ends_s


def row_of(index: int, prompt: Prompt) -> dict[str, Any]:
    characters = json.loads(prompt.verifier_json)["characters"]
    word = next(word for word, members in CLASSES.items() if members == characters)
    messages = [{"role": "user", "content": word}]
    return {"prompt": messages, "characters": characters, "index": index, "max_tokens": prompt.sampling["max_tokens"]}


def run(folder: Path) -> None:
    task = read_task(folder)
    model_folder = model_of(folder)
    record, prompts, lengths = Record(folder / RECORD_FOLDER), Prompts(task, model_folder), Lengths()
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model.generate = lengths.put_into(model.generate)
    rows = [row_of(index, prompts[index]) for index in range(task.groups * task.steps)]
    trainer = trainer_of(task, model, rows, folder / "trl")
    trainer.lengths, trainer.record, trainer.prompts = lengths, record, prompts
    trainer.add_callback(Commits(record, task.limit_s))
    trainer.train()


if __name__ == "__main__":
    run(Path(sys.argv[1]))
