"""Rows side by side, padded: for models whose rows cannot be packed (:mod:`dora.trainers.packing`)."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from dora.trainers.batches import by_group
from dora.trainers.objectives.batch import Row
from dora.trajectory import Trajectory


def padded_batches(rows: Sequence[Row], tokens_max: int) -> list[list[Row]]:
    """Rows of one group and of similar length, ``rows * longest`` within ``tokens_max``; a longer row is alone.

    A new batch begins where padding would cost more than reading the prompt once more does.
    """
    return [batch for members in by_group(rows) for batch in _of_group(members, tokens_max)]


def padded_logprobs(module: Any, trajectories: Sequence[Trajectory]) -> torch.Tensor:
    """(n,): the raw model's log probability of every response token, row after row; the rows share one prompt."""
    padded = response_logprobs(module, trajectories)
    return torch.cat([row[: each.length_tokens] for row, each in zip(padded, trajectories, strict=True)])


def _of_group(rows: Sequence[Row], tokens_max: int) -> Iterator[list[Row]]:
    batch: list[Row] = []
    padding = 0
    for row in sorted(rows, key=lambda row: (-row.length_tokens, row.trajectory.sample_index)):
        longest = (batch[0] if batch else row).length_tokens
        padding += longest - row.length_tokens
        prompt_tokens = len(row.trajectory.prompt_token_ids)
        if batch and ((len(batch) + 1) * longest > tokens_max or padding > prompt_tokens):
            yield batch
            batch, padding = [], 0
        batch.append(row)
    if batch:
        yield batch


def response_logprobs(module: Any, trajectories: Sequence[Trajectory]) -> torch.Tensor:
    """(rows, longest response): the raw model's log probability of every response token; padding holds anything.

    The trajectories share one prompt, which the model reads once: every row goes on from its keys and values. Rows are
    padded on the right, where causal attention never looks from the left.
    """
    device = next(module.parameters()).device
    prompt = torch.from_numpy(trajectories[0].prompt_token_ids.astype(np.int64)).to(device)[None]
    targets = _padded([each.response_token_ids for each in trajectories], torch.int64).to(device)
    rows, longest = targets.shape
    read = module(input_ids=prompt, use_cache=True, logits_to_keep=1)
    cache = read.past_key_values
    cache.batch_repeat_interleave(rows)
    beside = prompt.shape[1] - 1  # the prompt is attended to as well, and the last token is only a target
    known = [np.ones(beside + each.length_tokens, np.uint8) for each in trajectories]
    logits = read.logits.expand(rows, -1, -1).float()
    if longest > 1:
        attention_mask = _padded(known, torch.int64).to(device)
        rest = module(input_ids=targets[:, :-1], attention_mask=attention_mask, past_key_values=cache)
        logits = torch.cat([logits, rest.logits.float()], dim=1)
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return -losses.view(rows, longest)


def _padded(rows: Sequence[np.ndarray[Any, Any]], dtype: torch.dtype) -> torch.Tensor:
    padded = torch.zeros(len(rows), max(len(row) for row in rows), dtype=dtype)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = torch.from_numpy(row.astype(np.float32 if dtype.is_floating_point else np.int64))
    return padded
