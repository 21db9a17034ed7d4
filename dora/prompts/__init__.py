"""Prompt sources. Prompts are tokenized here, once; the rest of the service sees token ids."""

from collections.abc import Callable

from dora.config import PromptsConfig
from dora.data.types import Prompt
from dora.errors import InvalidValue
from dora.prompts.counting import counting_source
from dora.prompts.files import file_source, is_file_source
from dora.prompts.reasoning_gym import parse_mix, reasoning_gym_source
from dora.prompts.source import Position, PromptSource
from dora.prompts.tasks import tasks_source
from dora.prompts.tiny import TAIL_MAX, tiny_source, tiny_tail_source
from dora.prompts.tokenizer import ChatTokenizer

__all__ = [
    "ChatTokenizer",
    "Position",
    "PromptSource",
    "counting_source",
    "file_source",
    "parse_mix",
    "reasoning_gym_source",
    "resolve_prompts",
    "tasks_source",
    "tiny_source",
    "tiny_tail_source",
]

_REASONING_GYM = "reasoning-gym:"


def resolve_prompts(
    config: PromptsConfig | str,
    tokenizer: ChatTokenizer,
    seed: int = 0,
    limit_tokens: int | None = None,
    check: Callable[[Prompt], Prompt] = lambda prompt: prompt,
    progress: Callable[[str], None] = lambda line: None,
    longest_tokens: int = TAIL_MAX,
) -> PromptSource:
    """Returns the source that ``config`` (if a text, its ``source``) names.

    That is ``counting``, ``tiny``, ``tiny-tail``, ``tasks``, ``reasoning-gym:TASK[:WEIGHT],...``, a file, a dataset's
    folder, or ``none``.

    ``none`` has no prompts of its own: only those submitted over gRPC are sampled. Prompts of more than
    ``limit_tokens`` raise InvalidValue: of a file at once, of endless sources when they are drawn. Each prompt of a
    file is passed to ``check``, whose errors get the row's location. ``progress`` receives the progress of reading a
    file. ``longest_tokens`` is the limit of the responses that ``tiny-tail`` asks for.
    """
    if isinstance(config, str):
        config = PromptsConfig(source=config)
    spec = config.source
    if spec == "none":
        source = PromptSource("none", "", lambda index: None)
    elif spec == "tiny":
        source = tiny_source(tokenizer, seed, limit_tokens)
    elif spec == "tiny-tail":
        source = tiny_tail_source(tokenizer, seed, limit_tokens, longest_tokens)
    elif spec == "counting":
        source = counting_source(tokenizer, seed, limit_tokens)
    elif spec == "tasks":
        source = tasks_source()
    elif spec.startswith(_REASONING_GYM):
        source = reasoning_gym_source(parse_mix(spec.removeprefix(_REASONING_GYM)), tokenizer, seed, limit_tokens)
    elif is_file_source(spec):
        return file_source(config, tokenizer, limit_tokens, check, progress)
    else:
        names = "counting, tiny, tiny-tail, tasks, reasoning-gym:TASK[:WEIGHT],..."
        raise InvalidValue("--prompts", spec, f"{names}, a .jsonl or .parquet file, a dataset's folder, or none")
    _check_has_effect(config)
    return source


def _check_has_effect(config: PromptsConfig) -> None:
    """Raises InvalidValue for a setting that has no effect on a source without rows."""
    without = PromptsConfig(source=config.source, then=config.then)
    for name, value in config:
        if value != getattr(without, name):
            allowed = f"left out: it applies only to files and dataset folders, and the source is {config.source}"
            raise InvalidValue(f"prompts.{name}", value if not hasattr(value, "model_dump") else "(set)", allowed)
