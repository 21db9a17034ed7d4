"""The tiny models' task: write characters of the class that the prompt names.

A random model scores about 0.16 (a quarter of the alphabet is right). Every right character counts, so a few dozen
steps of reinforcement learning show an effect.
"""

import json
import random

from dora.data.types import Prompt
from dora.models.tiny_vocabulary import CLASSES
from dora.prompts.source import PromptSource, check_length
from dora.prompts.tokenizer import ChatTokenizer

REWARD = "dora.rewards.tiny:score"


def tiny_source(tokenizer: ChatTokenizer, seed: int = 0, limit_tokens: int | None = None) -> PromptSource:
    """Endless prompts of one word, DIGITS, SIGNS, EARLY or LATE, for a tokenizer of the tiny models."""
    words = tuple(CLASSES)

    def at(index: int) -> Prompt:
        word = random.Random(f"{seed}/{index}").choice(words)
        text, token_ids = tokenizer.encode_chat([{"role": "user", "content": word}])
        prompt = Prompt(
            prompt_id=f"tiny:{seed}:{index}",
            task_id=f"tiny.{word.lower()}",
            token_ids=token_ids,
            text=text,
            verifier_json=json.dumps({"characters": CLASSES[word]}),
        )
        return check_length(prompt, limit_tokens)

    return PromptSource("tiny", REWARD, at)
