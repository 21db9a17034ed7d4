"""Verifies drafted tokens on the CPU's runner without changing a sample.

vLLM's rejection sampling keeps the distribution, but another token may be sampled than without a draft. With this patch
each position of a draft is sampled as if no draft existed: with the sampling state after the drafted tokens before it,
and with the position's own draw of the request's random stream. The draft's longest prefix that equals what was sampled
is accepted, so tokens, logprobs and the random stream are those of an engine without drafts. For drafts without
probabilities this accepts as often as rejection sampling does.

Each position is also a sequence of its own to the attention kernels, because a kernel for several queries of one
sequence may round differently. Drafts come from the scheduler (``dora.worker.vllm.scheduler``), and vLLM's own
speculation is off: with it, vLLM would drop ``min_p``.
Source: vllm/v1/sample/rejection_sampler.py; vllm/v1/sample/ops/topk_topp_sampler.py, ``forward_cpu``.
"""

import copy
import functools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
import vllm.v1.worker.cpu_worker as cpu_worker
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata

from dora.data.types import SamplePlace
from dora.engine_patches.cpu.exact_resume import ResumingModelRunner, advance
from dora.engine_patches.patch import Patch, PatchFailed, nothing

NAME: Final = "own_noise"
_STREAMS_MAX: Final = 256  # of seeds whose draws are kept; others are drawn again
_REJECTED: Final = -1  # vLLM's mark of a token that was not sampled
_KNOWN: Final = {MinPLogitsProcessor, LogitBiasLogitsProcessor, MinTokensLogitsProcessor}


@dataclass(frozen=True, slots=True)
class Drafted:
    """The drafts of a step's requests, and the rows of fed tokens that are sampled: a draft's, and the one before."""

    drafts: list[list[int]]
    logits_indices: torch.Tensor

    @property
    def num_draft_tokens(self) -> list[int]:
        return [*map(len, self.drafts)]


class OwnNoiseSampler:
    """Stands in for vLLM's rejection sampler: samples all positions by vLLM's own sampler, one row a position."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __call__(
        self, drafted: Drafted, _probabilities: None, logits: torch.Tensor, sampling: SamplingMetadata
    ) -> SamplerOutput:
        """``logits`` has, for each request, a row for each drafted token and one more. Returns the sampled tokens as
        (requests, longest draft + 1), with ``_REJECTED`` after those that were sampled.
        """
        drafts = drafted.drafts
        counts = [len(draft) + 1 for draft in drafts]
        begun = {index: generator.get_state() for index, generator in sampling.generators.items() if drafts[index]}
        output = self._sampler(logits=logits, sampling_metadata=_by_position(sampling, counts, drafts))
        sampled = _split(output.sampled_token_ids[:, 0].tolist(), counts)
        kept = [_matching(draft, found) + 1 for draft, found in zip(drafts, sampled, strict=True)]
        for index, state in begun.items():
            if kept[index] < counts[index]:
                sampling.generators[index].set_state(state)
                advance(sampling.generators[index], kept[index])
        return _padded(output, sampled, kept, counts)


def _split(flat: list[int], counts: Sequence[int]) -> list[list[int]]:
    ends = np.cumsum(counts).tolist()
    return [flat[end - count : end] for end, count in zip(ends, counts, strict=True)]


def _matching(draft: Sequence[int], sampled: Sequence[int]) -> int:
    """Returns how many first tokens of a draft were sampled."""
    return next((at for at, token_id in enumerate(draft) if token_id != sampled[at]), len(draft))


def _padded(output: SamplerOutput, sampled: list[list[int]], kept: list[int], counts: list[int]) -> SamplerOutput:
    longest = max(counts)
    rows_of = [[*found[:count], *[_REJECTED] * (longest - count)] for found, count in zip(sampled, kept, strict=True)]
    token_ids = torch.tensor(rows_of, dtype=torch.int32)
    logprobs = output.logprobs_tensors
    if logprobs is not None:
        begins, lasts = np.cumsum(counts) - counts, np.asarray(counts) - 1
        rows = torch.from_numpy((begins[:, None] + np.minimum(np.arange(longest), lasts[:, None])).reshape(-1))
        logprobs = LogprobsTensors(
            logprobs.logprob_token_ids[rows], logprobs.logprobs[rows], logprobs.selected_token_ranks[rows]
        )
    return SamplerOutput(sampled_token_ids=token_ids, logprobs_tensors=logprobs)


def _by_position(sampling: SamplingMetadata, counts: list[int], drafts: list[list[int]]) -> SamplingMetadata:
    """Returns the sampling of each position as that of a request whose outputs include the drafted tokens before it."""
    requests = np.repeat(np.arange(len(counts)), counts)
    rows, own = torch.from_numpy(requests), sampling.generators
    places = np.arange(len(requests)) - np.repeat(np.cumsum(counts) - counts, counts)

    def of_rows(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[rows]

    def with_draft(outputs: Sequence[list[int]]) -> list[list[int]]:
        if not outputs:
            return []
        return [[*outputs[index], *drafts[index][:at]] for index, at in zip(requests, places, strict=True)]

    found = replace(
        sampling,
        temperature=of_rows(sampling.temperature),
        top_p=of_rows(sampling.top_p),
        top_k=of_rows(sampling.top_k),
        # A generator draws once a row, in this order: so each position gets its own draw.
        generators={row: own[index] for row, index in enumerate(requests.tolist()) if index in own},
        prompt_token_ids=of_rows(sampling.prompt_token_ids),
        output_token_ids=with_draft(sampling.output_token_ids),
        logitsprocs=_processors(sampling.logitsprocs, requests, places),
    )
    if not sampling.no_penalties:
        found.frequency_penalties = sampling.frequency_penalties[rows]
        found.presence_penalties = sampling.presence_penalties[rows]
        found.repetition_penalties = sampling.repetition_penalties[rows]
    return found


def _processors(whole: LogitsProcessors, requests: np.ndarray, places: np.ndarray) -> LogitsProcessors:
    """Returns the processors for rows of positions."""
    found = []
    for processor in whole.all:
        of_rows = processor
        if isinstance(processor, MinPLogitsProcessor) and processor.min_p_count:
            of_rows = copy.copy(processor)
            of_rows.min_p = processor.min_p[torch.from_numpy(requests)]
        elif isinstance(processor, MinTokensLogitsProcessor) and processor.min_toks:
            banned = [
                (row, token_id)
                for row, (index, at) in enumerate(zip(requests.tolist(), places.tolist(), strict=True))
                if index in processor.min_toks
                for least, outputs, stops, _ in [processor.min_toks[index]]
                if len(outputs) + at < least
                for token_id in stops
            ]
            of_rows = copy.copy(processor)
            of_rows.logits_slice = tuple(
                torch.tensor([each[part] for each in banned], dtype=torch.int32) for part in (0, 1)
            )
        found.append(of_rows)
    return LogitsProcessors(found)


class DraftingModelRunner(ResumingModelRunner):
    """The runner that verifies drafts. Steps without drafts take vLLM's own way."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rejection_sampler = OwnNoiseSampler(self.sampler)

    def initialize_metadata_builders(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_metadata_builders(*args, **kwargs)
        for group in self._attn_group_iterator():
            group.build_metadata = self._by_position(group.build_metadata)

    def _by_position(self, build: Any) -> Any:
        def built(whole: CommonAttentionMetadata, *args: Any, **kwargs: Any) -> Any:
            drafts = [len(each) for each in self.input_batch.spec_token_ids[: whole.num_reqs]]
            return build(positions_apart(whole, drafts) if any(drafts) else whole, *args, **kwargs)

        return built

    def _prepare_inputs(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        plain = super()._prepare_inputs(scheduler_output, *args, **kwargs)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        if not drafts:
            return plain
        of_requests = [drafts.get(request_id, []) for request_id in self.input_batch.req_ids]
        counts = np.array([len(draft) + 1 for draft in of_requests])
        ends = self.query_start_loc.np[1 : len(counts) + 1]
        rows = np.repeat(ends - np.cumsum(counts), counts) + np.arange(counts.sum())
        drafted = Drafted(of_requests, torch.from_numpy(rows))
        return drafted.logits_indices, drafted, int(counts.max())

    def _may_reorder_batch(self, scheduler_output: SchedulerOutput) -> None:
        # The positions of a draft count as decodes.
        fed = dict(scheduler_output.num_scheduled_tokens)
        for request_id in scheduler_output.scheduled_spec_decode_tokens:
            fed[request_id] = 1
        super()._may_reorder_batch(replace(scheduler_output, num_scheduled_tokens=fed))


def positions_apart(whole: CommonAttentionMetadata, drafts: Sequence[int]) -> CommonAttentionMetadata:
    """Returns the metadata in which each fed token of a request with a draft is a sequence of its own."""
    parts = np.array(drafts) + 1
    rows = np.repeat(np.arange(len(drafts)), parts)
    later = np.cumsum(parts)[rows] - 1 - np.arange(len(rows))  # fed tokens of the request after this one
    lengths = np.where(parts > 1, 1, np.diff(whole.query_start_loc_cpu.numpy()))[rows]
    starts = torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
    rows, later = torch.from_numpy(rows), torch.from_numpy(later)
    found = copy.copy(whole)
    found.query_start_loc = found.query_start_loc_cpu = starts
    found.seq_lens = (whole.seq_lens[rows] - later).to(whole.seq_lens.dtype)
    found.num_reqs = len(rows)
    found.max_query_len = int(lengths.max())
    found.block_table_tensor = whole.block_table_tensor[rows]
    for name in ("is_prefilling", "seq_lens_cpu_upper_bound"):
        value = getattr(whole, name)
        setattr(found, name, None if value is None else value[rows])
    if found.seq_lens_cpu_upper_bound is not None:
        found.seq_lens_cpu_upper_bound = found.seq_lens.clone()
    found._num_computed_tokens_cache = found._token_to_req_indices_cache = None
    return found


class _Stream:
    """The draws of a seed, one for each token of a response."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._draws: array[int] = array("i")

    def draw(self, number: int) -> int:
        if (more := number + 1 - len(self._draws)) > 0:
            self._draws.extend(torch.randint(0, 2**31, (more,), generator=self._generator).tolist())
        return self._draws[number]


_stream = functools.lru_cache(_STREAMS_MAX)(_Stream)


def sampled_alike(logits: torch.Tensor, places: Sequence[SamplePlace]) -> list[int]:
    """Returns what the engine's sampler would take of rows of logits, with their places' noise."""
    scale = torch.tensor([place.sampling.temperature for place in places])
    draws = torch.tensor([_stream(place.sampling.seed).draw(place.number) for place in places])
    scaled = logits.float() / torch.where(scale > 0, scale, 1.0)[:, None]
    sampled = torch.ops._C.fused_gumbel_argmax(scaled, draws)
    return torch.where(scale > 0, sampled, logits.argmax(dim=-1)).tolist()


def _apply() -> None:
    cpu_worker.CPUModelRunner = DraftingModelRunner


def _verify(runner: Any) -> None:
    if not isinstance(runner, DraftingModelRunner):
        raise PatchFailed(NAME, f"the model runner is {type(runner).__name__}")
    unknown = {type(each).__name__ for each in runner.input_batch.logitsprocs.all if type(each) not in _KNOWN}
    if unknown:
        raise PatchFailed(NAME, f"logits processors that do not know drafts: {sorted(unknown)}")


PATCH: Final = Patch(
    name=NAME,
    vllm_range=">=0.32,<0.33",
    reason="a draft changes no sampled token: each position is sampled with its own noise",
    apply=_apply,
    verify=_verify,
    after_reload=nothing,
)
