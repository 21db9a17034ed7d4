"""A request in vLLM's terms."""

import time
from array import array
from collections.abc import Sequence
from typing import Any

from vllm.sampling_params import SamplingParams as VllmSampling
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request

from dora.data.sampling import DOMAINS
from dora.data.types import RequestSpec
from dora.errors import InvalidValue
from dora.kvtier.chunks import salt_of
from dora.worker.stop_strings import StopWatch
from dora.worker.vllm.device.port import Device


class Made:
    """vLLM's request and its stop watch, not yet added: until then it may get outputs, with which it resumes.

    It includes the hashes of its blocks, the most expensive part, so it is made ahead of time if possible.
    """

    def __init__(self, core_request: Request, watch: StopWatch | None, device: Device, draws: int) -> None:
        """Neither ``core_request`` nor ``watch`` has seen an output. ``draws`` are those of earlier turns."""
        self._device = device
        self.core_request = core_request
        self.watch = watch
        self._prompt = array("i", core_request.prompt_token_ids)
        self._draws = draws
        if draws:
            core_request.sampling_params.extra_args = device.resume_arguments((), self._prompt, draws)

    @property
    def engine_id(self) -> str:
        return self.core_request.request_id

    def restore_outputs(self, outputs: Sequence[int]) -> None:
        """``outputs`` are all outputs of the turn so far, of which some may be known here."""
        new = list(outputs[self.core_request.num_output_tokens :])
        if not new:
            return
        draws = self._draws + len(outputs)
        self.core_request.sampling_params.extra_args = self._device.resume_arguments(outputs, self._prompt, draws)
        self.core_request.append_output_token_ids(new)
        self.core_request.prefill_stats = None  # they describe prompts; with outputs vLLM's assertions would fail
        if self.watch is not None:
            for token_id in new:
                self.watch.completed_by(token_id)


def to_vllm(request: RequestSpec, engine_id: str, stops: Sequence[int]) -> EngineCoreRequest:
    """Returns the engine's request without outputs. Raises InvalidValue as ``sampling_of`` does."""
    sampling = sampling_of(request, stops)
    return _core_request(engine_id, request.prompt_token_ids, sampling, salt_of(request.version))


def sampling_of(request: RequestSpec, stops: Sequence[int]) -> VllmSampling:
    """Returns the engine's sampling parameters; ``stops`` end the request unless it ignores them. vLLM reads no prefix
    cache for a request with prompt logprobs.

    Raises InvalidValue.
    """
    requested = request.sampling
    stop_token_ids = sorted({*requested.stop_token_ids, *(() if requested.ignore_eos else stops)})
    try:
        sampling = VllmSampling(
            temperature=requested.temperature,
            top_p=requested.top_p,
            top_k=requested.top_k,
            min_p=requested.min_p,
            seed=requested.seed,
            max_tokens=requested.max_tokens,
            min_tokens=requested.min_tokens,
            presence_penalty=requested.presence_penalty,
            frequency_penalty=requested.frequency_penalty,
            repetition_penalty=requested.repetition_penalty,
            stop_token_ids=stop_token_ids,
            ignore_eos=True,  # the model's own ends are among stop_token_ids
            logprobs=0,  # the sampled token's
            prompt_logprobs=0 if request.owes_prompt else None,  # those of the prompt's own tokens
            detokenize=False,  # stop strings are watched for by the engine's owner: dora.worker.stop_strings
        )
    except ValueError as error:
        raise InvalidValue("sampling", requested, f"what vLLM takes ({error})") from error
    for name in DOMAINS:  # the record has the requested parameters, so sampling must use them
        if name != "ignore_eos" and getattr(sampling, name) != getattr(requested, name):
            allowed = f"what the engine samples with: it would take {getattr(sampling, name)}"
            raise InvalidValue(f"sampling.{name}", getattr(requested, name), allowed)
    return sampling


def scoring(token_ids: Sequence[int], engine_id: str) -> EngineCoreRequest:
    """Returns a request for the logprobs of its own prompt; its one output token is unused."""
    sampling = VllmSampling(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False, ignore_eos=True)
    return _core_request(engine_id, token_ids, sampling, engine_id)


def _core_request(engine_id: str, token_ids: Sequence[int], sampling: Any, salt: str) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=engine_id,
        prompt_token_ids=list(token_ids),
        mm_features=None,
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=salt,
        data_parallel_rank=None,
    )
