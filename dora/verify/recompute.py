"""Recomputes logprobs with Hugging Face transformers. Loads torch."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dora.data.trajectory import Float32Array, Float64Array, Trajectory
from dora.errors import InvalidValue
from dora.models.int8 import quantise

_BATCH_TOKENS_MAX = 8192
_ROWS_MAX = 16


def load_model(folder: Path, quantisation: str = "") -> Any:
    """The causal language model of a version's folder, in fp32 regardless of its files, ready for inference.

    ``quantisation``: as applied by the engines. Raises InvalidValue for a model in which nothing can be quantised.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # the command has its own progress bar
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    if quantisation and not quantise(module):
        raise InvalidValue("quantisation", quantisation, "empty: the model has no projection to quantise")
    return module


def recomputed_logprobs(module: Any, trajectories: Sequence[Trajectory]) -> Iterator[tuple[Trajectory, Float32Array]]:
    """Every trajectory with the raw model's log probability of each of its response tokens; ordered by length."""
    for batch in _batches(trajectories):
        yield from zip(batch, _batch_logprobs(module, batch), strict=True)


def difference(trajectory: Trajectory, logprobs: Float32Array) -> Float64Array:
    """The absolute difference of the recorded logprobs from these, by token; infinite if one is NaN."""
    apart = np.abs(trajectory.logprobs.astype(np.float64) - logprobs)
    return np.where(np.isnan(apart), np.inf, apart)


def _batches(trajectories: Sequence[Trajectory]) -> Iterator[list[Trajectory]]:
    batch: list[Trajectory] = []
    for trajectory in sorted(trajectories, key=_length, reverse=True):
        rows = len(batch) + 1
        if batch and (rows > _ROWS_MAX or rows * _length(batch[0]) > _BATCH_TOKENS_MAX):
            yield batch
            batch = []
        batch.append(trajectory)
    if batch:
        yield batch


@torch.no_grad()
def _batch_logprobs(module: Any, batch: Sequence[Trajectory]) -> list[Float32Array]:
    """Pads on the right, which causal attention never reads; one row's logits at a time become logprobs."""
    token_ids = torch.zeros(len(batch), _length(batch[0]), dtype=torch.int64)
    attention_mask = torch.zeros_like(token_ids)
    for row, trajectory in enumerate(batch):
        sequence = np.concatenate([trajectory.prompt_token_ids, trajectory.response_token_ids]).astype(np.int64)
        token_ids[row, : len(sequence)] = torch.from_numpy(sequence)
        attention_mask[row, : len(sequence)] = 1
    logits = module(input_ids=token_ids, attention_mask=attention_mask, use_cache=False).logits
    found = []
    for row, trajectory in enumerate(batch):
        first, length = len(trajectory.prompt_token_ids), _length(trajectory)
        logprobs = torch.log_softmax(logits[row, first - 1 : length - 1].float(), dim=-1)
        found.append(logprobs.gather(1, token_ids[row, first:length, None])[:, 0].numpy())
    return found


def _length(trajectory: Trajectory) -> int:
    return len(trajectory.prompt_token_ids) + trajectory.length_tokens
