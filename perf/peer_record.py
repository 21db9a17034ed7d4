"""What every peer of ``perf/peers.py`` is given, and the run record that it leaves.

A peer trains the tiny model on the prompts ``tiny-tail``: response lengths are drawn from a long tail, the same for
every peer. Its record has the files of a run record of DORA (``dora/data/run_record.py``). A response that several
versions sampled has a segment for each in ``worker_history``, and the newest of them as ``behaviour_version``.
"""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from dora.data.record_content import STEPS_FILE
from dora.data.run_record import TRAJECTORIES_FILE, VERSIONS_FOLDER
from dora.data.trajectory import Trajectory
from dora.data.types import Prompt, SamplingParams, Segment
from dora.models.tiny import make_tiny
from dora.prompts.tiny import tiny_tail_source
from dora.prompts.tokenizer import ChatTokenizer
from dora.rewards.tiny import score

TASK_FILE: Final = "task.json"
MODEL_FOLDER: Final = "model"
RECORD_FOLDER: Final = "record"
CONTEXT_TOKENS: Final = 512  # of the engine: prompt and response


@dataclass(frozen=True, slots=True)
class Task:
    """The same for every peer."""

    steps: int = 40
    groups: int = 12
    group_size: int = 8
    learning_rate: float = 1e-3
    longest_tokens: int = 400
    slots: int = 64  # requests that all engines of a peer decode at once
    seed: int = 0
    limit_s: float = 400.0  # a peer that takes longer ends after its present step; a run of DORA fails

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def write(self, folder: Path) -> None:
        (folder / TASK_FILE).write_text(json.dumps(self.as_json()) + "\n")


def read_task(folder: Path) -> Task:
    return Task(**json.loads((folder / TASK_FILE).read_text()))


def model_of(folder: Path) -> Path:
    """The untrained model."""
    return make_tiny("dense", folder / MODEL_FOLDER)


class Prompts:
    """The task's prompts by index, and their rewards."""

    def __init__(self, task: Task, model: Path) -> None:
        self.tokenizer = ChatTokenizer(model)
        self._source = tiny_tail_source(self.tokenizer, task.seed, None, task.longest_tokens)

    def __getitem__(self, index: int) -> Prompt:
        prompt = self._source.at(index)
        assert prompt is not None  # the source is endless
        return prompt

    def reward(self, prompt: Prompt, token_ids: Sequence[int]) -> float:
        verifier = json.loads(prompt.verifier_json)
        return score(prompt.text, self.tokenizer.decode(token_ids), list(token_ids), verifier)


@dataclass(frozen=True, slots=True)
class Response:
    """One response. ``versions``: for each version that sampled it, that version and its first and last token."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[tuple[int, int, int]]


def trajectories_of(
    name: str, prompt: Prompt, responses: Sequence[Response], rewards: Sequence[float], step: int
) -> list[Trajectory]:
    """The responses of one prompt group, as they are trained on in ``step``."""
    max_tokens = int(prompt.sampling["max_tokens"])  # type: ignore[arg-type]
    made = []
    for index, (response, reward) in enumerate(zip(responses, rewards, strict=True)):
        version = response.versions[-1][0]
        made.append(
            Trajectory(
                trajectory_id=f"{name}/{index}",
                group_id=name,
                prompt_id=prompt.prompt_id,
                task_id=prompt.task_id,
                sample_index=index,
                group_size=len(responses),
                behaviour_version=version,
                reference_version=0,
                trained_step=step,
                staleness=step - version,
                prompt_token_ids=prompt.token_ids,  # type: ignore[arg-type]
                response_token_ids=response.token_ids,  # type: ignore[arg-type]
                logprobs=response.logprobs,  # type: ignore[arg-type]
                loss_mask=[1] * len(response.token_ids),  # type: ignore[arg-type]
                sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
                reward=reward,
                reward_valid=True,
                reward_components={},
                verifier_log="",
                finish_reason="length",
                started_at=0.0,
                finished_at=0.0,
                worker_history=tuple(
                    Segment("engine", first, last, "new", version) for version, first, last in response.versions
                ),
                length_tokens=len(response.token_ids),
            )
        )
    return made


class Record:
    """Appends what a peer trained on, and when."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / VERSIONS_FOLDER).mkdir(parents=True)

    def version_folder(self, version: int) -> Path:
        return self._folder / VERSIONS_FOLDER / str(version)

    def keep(self, trajectories: Iterable[Trajectory]) -> None:
        with (self._folder / TRAJECTORIES_FILE).open("a") as file:
            file.writelines(json.dumps(each.to_json_dict()) + "\n" for each in trajectories)

    def commit(self, step: int) -> None:
        with (self._folder / STEPS_FILE).open("a") as file:
            file.write(json.dumps({"step": step, "committed_at": time.time()}) + "\n")
