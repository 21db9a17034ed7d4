"""Counting: list the numbers from one to another. A small language model learns this task in a few steps.

The number of values has a long tail, like reasoning lengths: most answers are short, and the few long ones are still
running when the next version is published.
"""

import json
import random
from typing import Final

from dora.data.types import Prompt
from dora.prompts.source import PromptSource, check_length
from dora.prompts.tokenizer import ChatTokenizer

REWARD: Final = "dora.rewards.counting:score"
FIRST_MAX: Final = 9
COUNT_MIN, COUNT_MAX = 3, 16  # 16 numbers of two digits are 63 tokens of SmolLM2
COUNT_MEDIAN_LOG, COUNT_SIGMA = 1.6, 0.7  # lognormal distribution with a median of 5


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
