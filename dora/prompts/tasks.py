"""Numbered tasks without text, for environments that have tasks of their own."""

import json
from typing import Final

from dora.data.types import Prompt
from dora.prompts.source import PromptSource

REWARD: Final = "dora.rewards.by_environment:score"


def tasks_source() -> PromptSource:
    """Endless prompts whose verifier has ``task``: 0, 1, 2, ..."""

    def at(index: int) -> Prompt:
        return Prompt(f"tasks:{index}", "tasks", (), verifier_json=json.dumps({"task": index}))

    return PromptSource("tasks", REWARD, at)
