"""Recomputes logprobs with Hugging Face transformers. Loads torch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors import safe_open

from dora.data.trajectory import Float32Array, Float64Array, Trajectory
from dora.errors import InvalidValue
from dora.models.quantisation import quantise
from dora.weights.reference import read_header, weight_files

_BATCH_TOKENS_MAX: Final = 8192
_LOGITS_MAX: Final = 1 << 28  # of a batch: 1 GiB in fp32
_ROWS_MAX: Final = 256
_ONE_THREAD_MAX: Final = 4 << 30  # multiplications; with fewer, threads wait for each other longer than they compute


def load_model(folder: Path, quantisation: str = "") -> Any:
    """Returns the causal language model of a version's folder, in fp32 regardless of its files, for inference.

    ``quantisation`` is the engines'. Raises InvalidValue for a model in which nothing can be quantised.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # the command has its own progress bar
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    if quantisation and not quantise(module, quantisation):
        raise InvalidValue("quantisation", quantisation, "empty: the model has no projection to quantise")
    return module


class Models:
    """Loads one version after the other, each into the tensors of the one before if the architecture is the same."""

    def __init__(self) -> None:
        self._module: Any = None
        self._config = b""

    def load(self, folder: Path, quantisation: str = "") -> Any:
        """Does as ``load_model``. The module of the call before must not be used afterwards."""
        config = (folder / "config.json").read_bytes()
        if quantisation or config != self._config or not _filled(self._module, folder):
            self._module = None  # frees its memory first
            self._module = load_model(folder, quantisation)
            self._config = b"" if quantisation else config
        return self._module


@torch.no_grad()
def _filled(module: torch.nn.Module, folder: Path) -> bool:
    """Copies the weights of ``folder`` into ``module`` if these are exactly its tensors, by name and shape; a tied
    tensor once. Otherwise returns False; ``module`` is then to be loaded anew.
    """
    once: dict[int, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        once.setdefault(id(tensor), name)
    tensors = {name: tensor for name, tensor in module.state_dict().items() if name in once.values()}
    files = [folder / file for file in weight_files(folder)]
    headers = {name: header.shape for file in files for name, header in read_header(file).items()}
    if headers != {name: tuple(tensor.shape) for name, tensor in tensors.items()}:
        return False
    for file in files:
        with safe_open(file, framework="pt") as stream:
            for name in stream.keys():  # noqa: SIM118 - a method of safetensors
                tensors[name].copy_(stream.get_tensor(name))
    return True


def recomputed_logprobs(module: Any, trajectories: Sequence[Trajectory]) -> Iterator[tuple[Trajectory, Float32Array]]:
    """Every trajectory with the raw model's log probability of each of its response tokens; ordered by length."""
    for batch in _batches(trajectories, _tokens_max(module)):
        yield from zip(batch, _batch_logprobs(module, batch), strict=True)


def difference(trajectory: Trajectory, logprobs: Float32Array) -> Float64Array:
    """Returns the absolute difference of the logprobs by token: infinite for NaN, 0 for an environment's token."""
    apart = np.abs(trajectory.logprobs.astype(np.float64) - logprobs)
    return np.where(trajectory.loss_mask == 0, 0.0, np.where(np.isnan(apart), np.inf, apart))


def _tokens_max(module: Any) -> int:
    return min(_BATCH_TOKENS_MAX, _LOGITS_MAX // int(module.get_output_embeddings().weight.shape[0]))


def _batches(trajectories: Sequence[Trajectory], tokens_max: int) -> Iterator[list[Trajectory]]:
    batch: list[Trajectory] = []
    for trajectory in sorted(trajectories, key=_length, reverse=True):
        rows = len(batch) + 1
        if batch and (rows > _ROWS_MAX or rows * _length(batch[0]) > tokens_max):
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
    with _threads(token_ids.numel() * sum(tensor.numel() for tensor in module.parameters())):
        logits = module(input_ids=token_ids, attention_mask=attention_mask, use_cache=False).logits
        return [*_gathered(logits, token_ids, batch)]


@contextmanager
def _threads(multiplications: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1 if multiplications <= _ONE_THREAD_MAX else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _gathered(logits: torch.Tensor, token_ids: torch.Tensor, batch: Sequence[Trajectory]) -> Iterator[Float32Array]:
    for row, trajectory in enumerate(batch):
        first, length = len(trajectory.prompt_token_ids), _length(trajectory)
        logprobs = torch.log_softmax(logits[row, first - 1 : length - 1].float(), dim=-1)
        yield logprobs.gather(1, token_ids[row, first:length, None])[:, 0].numpy()


def _length(trajectory: Trajectory) -> int:
    return len(trajectory.prompt_token_ids) + trajectory.length_tokens
