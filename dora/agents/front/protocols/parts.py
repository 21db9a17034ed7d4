"""Parts of replies that the protocols share."""

import math
import time
import uuid
from collections.abc import Sequence
from typing import Any

from dora.agents.front.model import ServedModel
from dora.agents.front.request import MODEL, TurnRequest
from dora.agents.front.turns import NO_LOGPROB, RunningTurn
from dora.errors import InvalidValue


def head(kind: str, prefix: str, turns: Sequence[RunningTurn]) -> dict[str, Any]:
    """Returns the fields that begin a reply, or each chunk of one."""
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": f"{MODEL}-v{turns[0].version}",
    }


def usage(turns: Sequence[RunningTurn], prompts: int = 1) -> dict[str, int]:
    """Returns the tokens of a reply whose turns answer ``prompts`` prompts, each the same number of times."""
    prompt_tokens = sum(len(turn.prompt_token_ids) for turn in turns[:: len(turns) // prompts])
    sampled = sum(len(turn.token_ids) for turn in turns)
    return {"prompt_tokens": prompt_tokens, "completion_tokens": sampled, "total_tokens": prompt_tokens + sampled}


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else NO_LOGPROB


def token_logprobs(
    model: ServedModel, requested: TurnRequest, token_ids: Sequence[int], logprobs: Sequence[float]
) -> list[dict[str, Any]]:
    """Returns the logprobs of sampled tokens, as chat and ``generate`` give them."""
    found = []
    for token_id, logprob in zip(token_ids, logprobs, strict=True):
        text = token_text(model, requested, token_id)
        found.append(
            {
                "token": text,
                "token_id": token_id,
                "logprob": finite(logprob),
                "bytes": list(text.encode()),
                "top_logprobs": [],
            }
        )
    return found


def prompt_logprobs(
    model: ServedModel, requested: TurnRequest, turn: RunningTurn
) -> list[dict[str, Any] | None] | None:
    """Returns vLLM's ``prompt_logprobs`` of a request's first choice, or None if they were not asked for."""
    if not requested.prompt_logprobs:
        return None
    tokens = zip(turn.prompt_token_ids[1:], turn.prompt_logprobs, strict=True)
    found: list[dict[str, Any] | None] = [None]
    for token_id, logprob in tokens:
        text = model.tokenizer.decode([token_id], special_tokens=True)
        found.append({str(token_id): {"logprob": finite(logprob), "rank": None, "decoded_token": text}})
    return found


def token_text(model: ServedModel, requested: TurnRequest, token_id: int) -> str:
    return f"token_id:{token_id}" if requested.names_ids else model.tokenizer.decode([token_id], special_tokens=True)


def weight_versions(turn: RunningTurn) -> list[dict[str, int]]:
    """Returns vLLM's spans of versions: one, as a session has one version."""
    return [{"version": turn.version, "start": 0, "end": len(turn.token_ids)}]


def stop_reason(model: ServedModel, turn: RunningTurn) -> str | int | None:
    """Returns the stop string or the token that ended a turn, if it is not the model's end of text."""
    if turn.stop:
        return turn.stop
    last = turn.token_ids[-1] if turn.token_ids else None
    return last if turn.finish_reason == "stop" and last not in model.ends else None


def joined_text(content: Any, field: str) -> str:
    """Returns a text, or that of a list of text parts. Raises InvalidValue."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidValue(field, content, "a text or a list of text parts")
    return "".join(map(str, texts))


def listed(value: Any, field: str) -> list[Any]:
    """Returns a list, an empty one for None. Raises InvalidValue for anything else."""
    if value is not None and not isinstance(value, list):
        raise InvalidValue(field, value, "a list")
    return value or []
