"""Prompts that a demo evaluates and never trains on: those that its own source has for another seed."""

import json
from itertools import islice
from pathlib import Path
from typing import Final

from dora.config import Config
from dora.models import resolve_model
from dora.prompts.files import is_file_source
from dora.prompts.resolving import resolve_prompts
from dora.prompts.tokenizer import ChatTokenizer

COUNT: Final = 8
SEED: Final = 1_000_003  # beyond the run's own
WITHOUT: Final = ("none", "tasks")  # sources that have no further prompts


def has_held_out(source: str) -> bool:
    """Returns whether a source has prompts for every seed."""
    return source not in WITHOUT and not is_file_source(source)


def write_held_out(file: Path, config: Config) -> None:
    """Writes a file for ``evaluation.prompts``. Prepares the model, whose tokenizer the prompts need."""
    tokenizer = ChatTokenizer(resolve_model(config.model, Path(config.cache) if config.cache else None))
    seed, longest = config.rollout.seed + SEED, config.rollout.max_tokens
    source = resolve_prompts(config.prompts, tokenizer, seed, longest_tokens=longest)
    rows = (
        {
            "prompt_id": f"held-out:{number}",
            "task_id": prompt.task_id,
            "prompt_token_ids": list(prompt.token_ids),
            "verifier": json.loads(prompt.verifier_json),
            "sampling": dict(prompt.sampling),
            "group_size": 1,
        }
        for number, prompt in enumerate(islice(source, COUNT))
    )
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
