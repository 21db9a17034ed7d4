"""Padded batches of rows, for models whose rows cannot be packed (:mod:`dora.trainers.packing`)."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from dora.data.trajectory import Trajectory
from dora.trainers.batches import by_group
from dora.trainers.objectives.batch import Row
from dora.trainers.packing import LAYERS
from dora.trainers.router_replay import OWN, RouterReplay, rows_of


def padded_batches(rows: Sequence[Row], tokens_max: int) -> list[list[Row]]:
    """Batches rows of one group and similar length, ``rows * longest`` within ``tokens_max``; a longer row is alone.

    A new batch begins when padding would cost more than another reading of the prompt.
    """
    return [batch for members in by_group(rows) for batch in _of_group(members, tokens_max)]


def padded_logprobs(
    module: Any, trajectories: Sequence[Trajectory], routers: RouterReplay | None = None
) -> torch.Tensor:
    """(n,): the raw model's log probability of every response token, row after row; the rows share one prompt. Each
    reads it if layers keep a state, which transformers does not repeat for them.

    ``routers``, those of ``module``, use the recorded experts. If None, they choose.
    """
    config = getattr(module, "config", None)
    if {*(getattr(config, "layer_types", None) or ())} - LAYERS:
        return whole_row_logprobs(module, trajectories, routers)
    padded = response_logprobs(module, trajectories, routers)
    return torch.cat([row[: each.length_tokens] for row, each in zip(padded, trajectories, strict=True)])


def whole_row_logprobs(
    module: Any, trajectories: Sequence[Trajectory], routers: RouterReplay | None = None
) -> torch.Tensor:
    """Does as :func:`padded_logprobs`, in exactly one pass, in which every row reads the prompt.

    The ranks of a sharded model must make the same passes, whatever rows each has.
    """
    device = next(module.parameters()).device
    rows = [np.concatenate([each.prompt_token_ids, each.response_token_ids]) for each in trajectories]
    read = _padded([row[:-1] for row in rows], torch.int64).to(device)
    known = _padded([np.ones(len(row) - 1, np.uint8) for row in rows], torch.int64).to(device)
    with _sending(routers, rows_of(trajectories), read.shape[1]):
        logits = module(input_ids=read, attention_mask=known, use_cache=False).logits
    parts = []
    for row, each in zip(logits, trajectories, strict=True):
        first = len(each.prompt_token_ids) - 1
        targets = torch.from_numpy(each.response_token_ids.astype(np.int64)).to(device)
        predicted = row[first : first + len(targets)].float()
        parts.append(-torch.nn.functional.cross_entropy(predicted, targets, reduction="none"))
    return torch.cat(parts)


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


def response_logprobs(
    module: Any, trajectories: Sequence[Trajectory], routers: RouterReplay | None = None
) -> torch.Tensor:
    """(rows, longest response): the raw model's log probability of every response token; padding is undefined.

    The trajectories share one prompt (``shared_prompt``), which the model reads once; every row continues from its keys
    and values. Rows are padded on the right, which causal attention never reads.
    """
    device = next(module.parameters()).device
    prompt = torch.from_numpy(trajectories[0].prompt_token_ids.astype(np.int64)).to(device)[None]
    targets = _padded([each.response_token_ids for each in trajectories], torch.int64).to(device)
    rows, longest = targets.shape
    routed = rows_of(trajectories)
    with _sending(routers, routed and routed[:1], prompt.shape[1]):
        read = module(input_ids=prompt, use_cache=True, logits_to_keep=1)
    cache = read.past_key_values
    cache.batch_repeat_interleave(rows)
    beside = prompt.shape[1] - 1  # attention includes the prompt, and the last token is only a target
    known = [np.ones(beside + each.length_tokens, np.uint8) for each in trajectories]
    logits = read.logits.expand(rows, -1, -1).float()
    if longest > 1:
        attention_mask = _padded(known, torch.int64).to(device)
        of_responses = routed and [each[prompt.shape[1] :] for each in routed]
        with _sending(routers, of_responses, longest - 1):
            rest = module(input_ids=targets[:, :-1], attention_mask=attention_mask, past_key_values=cache)
        logits = torch.cat([logits, rest.logits.float()], dim=1)
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return -losses.view(rows, longest)


def _sending(
    routers: RouterReplay | None, rows: Sequence[np.ndarray[Any, Any]] | None, tokens: int
) -> AbstractContextManager[None]:
    if routers is None or rows is None:
        return nullcontext()
    padded = np.full((len(rows), tokens, *rows[0].shape[1:]), OWN, np.int32)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row[:tokens]
    return routers.sending(torch.from_numpy(padded).flatten(0, 1))


def _padded(rows: Sequence[np.ndarray[Any, Any]], dtype: torch.dtype) -> torch.Tensor:
    padded = torch.zeros(len(rows), max(len(row) for row in rows), dtype=dtype)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = torch.from_numpy(row.astype(np.float32 if dtype.is_floating_point else np.int64))
    return padded
