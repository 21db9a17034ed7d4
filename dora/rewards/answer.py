"""The verifier of prompts that carry their answer, such as those of a JSONL file."""

import re
from typing import Any

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def final_answer(response_text: str) -> str:
    """Returns the content of the last ``<answer>`` tag, or the whole response, without outer white space."""
    tagged = _TAGGED.findall(response_text)
    return (tagged[-1] if tagged else response_text).strip()


def score(
    prompt_text: str, response_text: str, response_token_ids: list[int], verifier: dict[str, Any]
) -> dict[str, Any]:
    """Returns 1 if the final answer is ``verifier["answer"]``, else 0. Raises ValueError without an answer."""
    if "answer" not in verifier:
        raise ValueError("this prompt has no answer; give it one, or name another function with --reward")
    expected, found = str(verifier["answer"]).strip(), final_answer(response_text)
    return {"reward": float(found == expected), "log": f"expected {expected!r}, found {found[:200]!r}"}
