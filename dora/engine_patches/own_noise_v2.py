"""Verifies drafted tokens on Model Runner V2 without changing a sample: ``cpu/own_noise.py`` gives the reason.

This runner's noise is a function of seed, position and token, and its sampler already treats each logits row as a
position with the drafted tokens before it. So all rows are sampled by vLLM's own sampler, and the draft's longest
prefix that equals what was sampled is accepted. vLLM's rejection kernels, which draw otherwise, are not used. Drafts
come with the scheduler's output and are copied to the place from which vLLM reads those of its own speculators.

Kernels for several queries of one sequence may round differently on GPUs, as with another batch.
Source: vllm/v1/worker/gpu/model_runner.py; sample/sampler.py; spec_decode/rejection_sampler.py.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, cast

import numpy as np
import torch

from dora.data.limits import DRAFT_TOKENS_MAX
from dora.data.types import SamplePlace
from dora.engine_patches.patch import Patch, PatchFailed, nothing

NAME: Final = "own_noise_v2"
_MARK: Final = "_dora_own_noise"


def verified(sampler: Any, output: Any, batch: Any) -> Any:
    """Returns the output of a step with drafts, whose rows were all sampled: (requests, longest draft + 1) tokens, and
    how many of them count.
    """
    from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected

    flat, device = output.sampled_token_ids[:, 0], output.sampled_token_ids.device
    fed = batch.input_ids[batch.logits_indices]  # a row's token; later rows of a request were fed its draft
    begins, counts = batch.cu_num_logits[:-1], torch.diff(batch.cu_num_logits)
    places = torch.arange(int(np.diff(batch.cu_num_logits_np).max()), device=device)
    rows = (begins[:, None] + places).clamp(max=len(flat) - 1).long()
    sampled, has_row = flat[rows], places < counts[:, None]
    matches = (fed[rows[:, 1:]] == sampled[:, :-1]) & has_row[:, 1:]
    kept = (1 + matches.cumprod(dim=1).sum(dim=1)).to(output.num_sampled.dtype)
    num_sampled, num_rejected = get_num_sampled_and_rejected(
        kept, batch.seq_lens, batch.cu_num_logits, batch.idx_mapping, sampler.req_states.prefill_len.gpu
    )
    return replace(output, sampled_token_ids=sampled.contiguous(), num_sampled=num_sampled, num_rejected=num_rejected)


def place_drafts(runner: Any, scheduler_output: Any) -> None:
    """Copies the step's drafts to the requests' rows on the device."""
    drafts = scheduler_output.scheduled_spec_decode_tokens
    table = np.zeros((len(drafts), DRAFT_TOKENS_MAX), dtype=np.int64)
    for row, draft in zip(table, drafts.values(), strict=True):
        row[: len(draft)] = draft
    states = runner.req_states
    indices = torch.tensor([states.req_id_to_index[request_id] for request_id in drafts], device=runner.device)
    states.draft_tokens[indices] = torch.from_numpy(table).to(runner.device, states.draft_tokens.dtype)


def sampled_alike(logits: torch.Tensor, places: Sequence[SamplePlace], *, use_fp64: bool) -> list[int]:
    """Returns what the engine's sampler would take of rows of logits, with their places' noise.

    The runner's position of a sample is that of the token before it (``Sampler.__call__``).
    """
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    def of(values: Iterable[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([*values], dtype=dtype, device=logits.device)

    chosen = gumbel_sample(
        logits,
        torch.arange(len(places), dtype=torch.int32, device=logits.device),
        of((place.sampling.temperature for place in places), torch.float32),
        of((place.sampling.seed for place in places), torch.int64),
        of((place.position - 1 for place in places), torch.int64),
        apply_temperature=True,
        is_drafting=False,
        use_fp64=use_fp64,
    )
    return cast("list[int]", chosen.tolist())


def _apply() -> None:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    if hasattr(Sampler.__call__, _MARK):
        return
    begin, prepare, sample = GPUModelRunner.__init__, GPUModelRunner.prepare_inputs, Sampler.__call__

    @functools.wraps(begin)
    def begun(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        drafts = self.req_states.draft_tokens
        if not drafts.shape[1]:  # no speculator of vLLM's own
            self.req_states.draft_tokens = drafts.new_zeros(drafts.shape[0], DRAFT_TOKENS_MAX)

    @functools.wraps(prepare)
    def prepared(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if not scheduler_output.scheduled_spec_decode_tokens or self.speculator is not None:
            return prepare(self, scheduler_output, *args, **kwargs)
        place_drafts(self, scheduler_output)
        plain, self.decode_query_len = self.decode_query_len, DRAFT_TOKENS_MAX + 1  # the most rows of a request
        try:
            return prepare(self, scheduler_output, *args, **kwargs)
        finally:
            self.decode_query_len = plain  # by which steps without drafts have their CUDA graphs

    @functools.wraps(sample)
    def sampled(self: Any, logits: torch.Tensor, input_batch: Any) -> Any:
        output = sample(self, logits, input_batch)
        return verified(self, output, input_batch) if input_batch.num_draft_tokens else output

    setattr(sampled, _MARK, True)
    GPUModelRunner.__init__, GPUModelRunner.prepare_inputs, Sampler.__call__ = begun, prepared, sampled


def _verify(runner: Any) -> None:
    if runner.sampler is not None and not hasattr(type(runner.sampler).__call__, _MARK):  # the last stage alone has one
        raise PatchFailed(NAME, f"the sampler is {type(runner.sampler).__name__}")
    if runner.req_states.draft_tokens.shape[1] < DRAFT_TOKENS_MAX:
        raise PatchFailed(NAME, f"requests have room for drafts of {runner.req_states.draft_tokens.shape[1]} tokens")


PATCH: Final = Patch(
    name=NAME,
    vllm_range=">=0.32,<0.33",
    reason="a draft changes no sampled token: each position is sampled with its own noise",
    apply=_apply,
    verify=_verify,
    after_reload=nothing,
)
