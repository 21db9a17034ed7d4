"""Counting: list the numbers from one to another. A task that a small language model learns in a few steps.

How many numbers are asked for has a long tail, as the lengths of reasoning have: most answers are short, and the few
long ones are still being written when the next version is published.
"""

import json
import random
from typing import Final

from dora.data.types import Prompt
from dora.prompts.source import PromptSource, check_length
from dora.prompts.tokenizer import ChatTokenizer

REWARD: Final = "dora.rewards.counting:score"
FIRST_MAX: Final = 9
COUNT_MIN, COUNT_MAX = 3, 16  # so many, of two digits each, are 63 tokens of SmolLM2
COUNT_MEDIAN_LOG, COUNT_SIGMA = 1.6, 0.7  # of the lognormal distribution: a median of 5


def counting_source(tokenizer: ChatTokenizer, seed: int = 0, limit_tokens: int | None = None) -> PromptSource:
    """Endless prompts such as ``List the numbers from 7 to 12, separated by commas.``, in the model's chat template."""

    def at(index: int) -> Prompt:
        chance = random.Random(f"{seed}/{index}")
        first = chance.randint(1, FIRST_MAX)
        count = round(chance.lognormvariate(COUNT_MEDIAN_LOG, COUNT_SIGMA))
        last = first + min(max(count, COUNT_MIN), COUNT_MAX) - 1
        question = f"List the numbers from {first} to {last}, separated by commas."
        text, token_ids = tokenizer.encode_chat([{"role": "user", "content": question}])
        prompt = Prompt(
            prompt_id=f"counting:{seed}:{index}",
            task_id="counting",
            token_ids=token_ids,
            text=text,
            verifier_json=json.dumps({"first": first, "last": last}),
        )
        return check_length(prompt, limit_tokens)

    return PromptSource("counting", REWARD, at)
