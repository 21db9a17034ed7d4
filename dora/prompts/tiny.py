"""The tiny models' task: write characters of the class that the prompt names.

A random model scores about 0.16 (a quarter of the alphabet is right). Every right character counts, so a few dozen
steps of reinforcement learning show an effect.
"""

import json
import random
from collections.abc import Mapping
from typing import Final

from dora.data.types import Prompt, SamplingValue
from dora.models.tiny_vocabulary import CLASSES
from dora.prompts.source import PromptSource, check_length
from dora.prompts.tokenizer import ChatTokenizer

REWARD = "dora.rewards.tiny:score"
TAIL_MIN, TAIL_MEDIAN_LOG, TAIL_SIGMA = 12, 3.7, 1.3  # lognormal distribution of lengths in tokens, with a median of 40
TAIL_MAX: Final = 400


def tiny_source(tokenizer: ChatTokenizer, seed: int = 0, limit_tokens: int | None = None) -> PromptSource:
    """Endless prompts of one word, DIGITS, SIGNS, EARLY or LATE, for a tokenizer of the tiny models."""
    return _source("tiny", tokenizer, seed, limit_tokens, None)


def tiny_tail_source(
    tokenizer: ChatTokenizer, seed: int = 0, limit_tokens: int | None = None, longest_tokens: int = TAIL_MAX
) -> PromptSource:
    """The same prompts, each with a response length from a long-tailed distribution, at most ``longest_tokens``.

    Random models end a response at a geometric length, which has no long tail. Here most responses are short, and the
    few long ones are still running when later versions are published, as with reasoning lengths.
    """
    return _source("tiny-tail", tokenizer, seed, limit_tokens, longest_tokens)


def _source(
    name: str, tokenizer: ChatTokenizer, seed: int, limit_tokens: int | None, longest_tokens: int | None
) -> PromptSource:
    words = tuple(CLASSES)

    def at(index: int) -> Prompt:
        chance = random.Random(f"{seed}/{index}")
        word = chance.choice(words)
        sampling: Mapping[str, SamplingValue] = {}
        if longest_tokens is not None:
            length_tokens = max(TAIL_MIN, round(chance.lognormvariate(TAIL_MEDIAN_LOG, TAIL_SIGMA)))
            sampling = {"max_tokens": min(length_tokens, longest_tokens), "ignore_eos": True}
        text, token_ids = tokenizer.encode_chat([{"role": "user", "content": word}])
        prompt = Prompt(
            prompt_id=f"{name}:{seed}:{index}",
            task_id=f"tiny.{word.lower()}",
            token_ids=token_ids,
            text=text,
            sampling=sampling,
            verifier_json=json.dumps({"characters": CLASSES[word]}),
        )
        return check_length(prompt, limit_tokens)

    return PromptSource(name, REWARD, at)
