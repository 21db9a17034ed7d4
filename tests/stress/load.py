"""The load of a stress run: the models, and prompts with a long tail of lengths."""

import json
import random
from pathlib import Path
from typing import Any, Final

from dora.models.tiny import TinyKind, make_tiny
from dora.models.tiny_vocabulary import CLASSES
from dora.rewards import tiny
from tests.session_script import is_empty
from tests.tools import as_sessions

MODELS: Final[dict[str, tuple[TinyKind, tuple[int, int]]]] = {
    "qwen3-moe": ("moe", (64, 8)),
    "deepseek-v2": ("mla", (64, 6)),
    "tiny-hybrid": ("hybrid", (64, 8)),
}
BOTH: Final = ("qwen3-moe", "deepseek-v2")
REWARD: Final = f"{tiny.__name__}:score"
GROUP_SIZE: Final = 4
LONGEST_TOKENS: Final = 400
TURN_TOKENS: Final = (4, 60)
_MEDIAN_TOKENS: Final = 40.0
_SHORTEST_TOKENS: Final = 4
_SPREAD: Final = 0.9  # of the lengths' logarithm: one in a hundred is eight times the median


def model_in(name: str, folder: Path) -> Path:
    """A model of random weights, of the family's architecture, in the folder ``folder/name``."""
    kind, experts = MODELS[name]
    return make_tiny(kind, folder / name, experts=experts)


def write_prompts(file: Path, groups: int, seed: int, sessions: float) -> set[str]:
    """As many prompts as lines; their ids. Three of four groups go on after an end of sequence, to the limit drawn.
    ``sessions``: the share of groups with an environment.
    """
    rows = prompt_rows(groups, seed)
    as_sessions(rows, sessions, TURN_TOKENS, seed)
    for row in rows:
        while is_empty(row["prompt_id"]):  # a row of a file has its prompt
            row["prompt_id"] += "f"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {row["prompt_id"] for row in rows}


def prompt_rows(groups: int, seed: int) -> list[dict[str, Any]]:
    """The same, as rows of a prompts file."""
    chance = random.Random(seed)
    return [_row(f"p{number}", chance) for number in range(groups)]


def _row(prompt_id: str, chance: random.Random) -> dict[str, Any]:
    word = chance.choice(tuple(CLASSES))
    drawn = round(chance.lognormvariate(0.0, _SPREAD) * _MEDIAN_TOKENS)
    sampling = {
        "max_tokens": min(max(drawn, _SHORTEST_TOKENS), LONGEST_TOKENS),
        "ignore_eos": chance.random() < 0.75,
    }
    return {
        "prompt_id": prompt_id,
        "messages": [{"role": "user", "content": word}],
        "verifier": {"characters": CLASSES[word]},
        "sampling": sampling,
    }
