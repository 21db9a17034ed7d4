"""Where prompts come from. Tokenisation happens here, once: from here on everything is token ids."""

from pathlib import Path

from dora.errors import InvalidValue
from dora.prompts.counting import counting_source
from dora.prompts.jsonl import jsonl_source
from dora.prompts.reasoning_gym import parse_mix, reasoning_gym_source
from dora.prompts.source import PromptSource
from dora.prompts.tiny import tiny_source
from dora.prompts.tokenizer import ChatTokenizer

__all__ = [
    "ChatTokenizer",
    "PromptSource",
    "counting_source",
    "jsonl_source",
    "parse_mix",
    "reasoning_gym_source",
    "resolve_prompts",
    "tiny_source",
]

_REASONING_GYM = "reasoning-gym:"


def resolve_prompts(
    spec: str, tokenizer: ChatTokenizer, seed: int = 0, limit_tokens: int | None = None
) -> PromptSource:
    """The source that ``spec`` names.

    That is ``counting``, ``tiny``, ``reasoning-gym:TASK[:WEIGHT],...``, a ``.jsonl`` file, or ``none``.

    ``none`` has no prompts of its own: only those submitted over gRPC are sampled. Prompts of more than
    ``limit_tokens`` raise InvalidValue: of a file at once, of endless sources when they come up.
    """
    if spec == "none":
        return PromptSource("none", "", lambda index: None)
    if spec == "tiny":
        return tiny_source(tokenizer, seed, limit_tokens)
    if spec == "counting":
        return counting_source(tokenizer, seed, limit_tokens)
    if spec.startswith(_REASONING_GYM):
        return reasoning_gym_source(parse_mix(spec.removeprefix(_REASONING_GYM)), tokenizer, seed, limit_tokens)
    if spec.endswith(".jsonl"):
        return jsonl_source(Path(spec).expanduser(), tokenizer, limit_tokens)
    raise InvalidValue("--prompts", spec, "counting, tiny, reasoning-gym:TASK[:WEIGHT],..., a .jsonl file, or none")
