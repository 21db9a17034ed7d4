"""Samples responses of a causal language model of transformers, a batch at a time, and compares two of its versions."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Response:
    """One sampled response. ``logprobs``: of its tokens, natural logarithms."""

    token_ids: list[int]
    logprobs: list[float]
    has_ended: bool  # by an end token, which is its last


@torch.no_grad()
def sampled(
    module: Any,
    prompts: Sequence[Sequence[int]],
    max_tokens: Sequence[int],
    end_token_ids: Collection[int],
    generator: torch.Generator,
) -> list[Response]:
    """Samples one response to each prompt at temperature 1. ``max_tokens``: of each response."""
    ids, mask = left_padded(prompts)
    ends = torch.tensor(sorted(end_token_ids), dtype=torch.int64)
    limits = torch.tensor(max_tokens)
    running = torch.ones(len(prompts), dtype=torch.bool)
    tokens: list[torch.Tensor] = []
    logprobs: list[torch.Tensor] = []
    lengths = torch.zeros(len(prompts), dtype=torch.int64)
    ended = torch.zeros(len(prompts), dtype=torch.bool)
    cache, given = None, ids
    while bool(running.any()):
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -given.shape[1] :]
        out = module(
            input_ids=given, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )
        cache = out.past_key_values
        scores = out.logits[:, -1].float().log_softmax(-1)
        chosen = torch.multinomial(scores.exp(), 1, generator=generator)
        tokens.append(chosen[:, 0])
        logprobs.append(scores.gather(1, chosen)[:, 0])
        lengths += running
        ended |= running & torch.isin(chosen[:, 0], ends)
        running &= ~ended & (lengths < limits)
        given, mask = chosen, torch.cat([mask, torch.ones_like(chosen)], 1)
    found_ids, found_logprobs = torch.stack(tokens, 1).tolist(), torch.stack(logprobs, 1).tolist()
    return [
        Response(row[:length], values[:length], end)
        for row, values, length, end in zip(found_ids, found_logprobs, lengths.tolist(), ended.tolist(), strict=True)
    ]


@torch.no_grad()
def token_distributions(module: Any, prompts: Sequence[Sequence[int]], responses: Sequence[Response]) -> torch.Tensor:
    """(tokens of all responses, vocabulary): the log probabilities from which each token was or would be sampled."""
    ids, mask = left_padded([[*prompt, *each.token_ids] for prompt, each in zip(prompts, responses, strict=True)])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = module(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    rows = [logits[row, -len(each.token_ids) - 1 : -1] for row, each in enumerate(responses)]
    return torch.cat(rows).float().log_softmax(-1)


def divergence(before: torch.Tensor, after: torch.Tensor) -> float:
    """The mean over tokens of KL(before || after), in nats."""
    return float((before.exp() * (before - after)).sum(-1).mean())


def left_padded(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, longest) token ids, padded at the left with 0, and the mask of those that are not padding."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return ids, mask
