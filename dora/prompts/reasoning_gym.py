"""Procedural tasks of the package reasoning-gym: endless, with verifiers, without downloads."""

import json
import math
import random
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from dora.data.types import Prompt
from dora.errors import InvalidValue, NotFound
from dora.prompts.source import PromptSource, check_length
from dora.prompts.tokenizer import ChatTokenizer

REWARD = "dora.rewards.reasoning_gym:score"
_BLOCK_ENTRIES = 1024  # some tasks create all entries at once, so an endless source consists of blocks


def parse_mix(text: str) -> dict[str, float]:
    """Parses ``"chain_sum:2,leg_counting:1"`` to {"chain_sum": 2.0, "leg_counting": 1.0}; the default weight is 1.

    Raises InvalidValue for a task named twice or a weight that is not a positive number.
    """
    mix: dict[str, float] = {}
    for part in text.split(","):
        task, _, weight_text = part.strip().partition(":")
        try:
            weight = float(weight_text or 1.0)
        except ValueError:
            weight = math.nan
        if not task or task in mix or not 0.0 < weight < math.inf:
            raise InvalidValue("--prompts", text, "reasoning-gym:TASK[:WEIGHT],..., each task once, weights above 0")
        mix[task] = weight
    return mix


def reasoning_gym_source(
    mix: Mapping[str, float], tokenizer: ChatTokenizer, seed: int = 0, limit_tokens: int | None = None
) -> PromptSource:
    """Endless prompts of a task mix (task name -> weight), as one user message in the model's chat template.

    The verifier gets the whole entry, so it can score without creating it again. Raises InvalidValue for an unknown
    task, NotFound if the package is missing.
    """
    makers = {task: _entry_maker(task, seed) for task in mix}
    tasks, weights = list(mix), list(mix.values())

    def at(index: int) -> Prompt:
        task = random.Random(f"{seed}/{index}").choices(tasks, weights)[0]
        entry = makers[task](index)
        text, token_ids = tokenizer.encode_chat([{"role": "user", "content": entry["question"]}])
        prompt = Prompt(
            prompt_id=f"reasoning-gym:{seed}:{index}",
            task_id=task,
            token_ids=token_ids,
            text=text,
            verifier_json=json.dumps({"task": task, "entry": entry}),
        )
        return check_length(prompt, limit_tokens)

    return PromptSource("reasoning-gym", REWARD, at)


def _entry_maker(task: str, seed: int) -> Callable[[int], dict[str, Any]]:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        allowed = "a source whose package is installed"
        raise NotFound("--prompts", "reasoning-gym", allowed, why="needs the package reasoning-gym") from error
    if task not in DATASETS or task == "composite":  # composite is a mix of tasks; DORA's mix replaces it
        known = ", ".join(sorted(set(DATASETS) - {"composite"}))
        raise InvalidValue("--prompts", f"reasoning-gym:{task}", f"one of {known}")

    @lru_cache(maxsize=1)
    def block(number: int) -> Any:
        return reasoning_gym.create_dataset(task, size=_BLOCK_ENTRIES, seed=seed + number * _BLOCK_ENTRIES)

    def entry_at(index: int) -> dict[str, Any]:
        number, place = divmod(index, _BLOCK_ENTRIES)
        return json.loads(json.dumps(block(number)[place]))

    _check_survives_json(task, block(0), entry_at(0))
    return entry_at


def _check_survives_json(task: str, dataset: Any, entry: dict[str, Any]) -> None:
    """Refuses a task whose verifier scores an entry differently after its tuples became lists."""
    answer = dataset[0]["answer"]
    if dataset.score_answer(answer, entry) != dataset.score_answer(answer, dataset[0]):
        raise InvalidValue("--prompts", f"reasoning-gym:{task}", "a task whose verifier takes entries read from JSON")
