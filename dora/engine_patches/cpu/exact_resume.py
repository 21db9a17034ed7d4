"""Lets a request enter the model runner with outputs that another engine sampled.

vLLM's runner treats every new request as a prompt without outputs. Re-sending outputs as prompt changes later tokens:
output penalties, ``min_tokens`` and ``max_tokens`` count from the prompt's end, and the seeded random stream restarts.
With this patch a new request whose sampling parameters carry ``OUTPUTS_KEY`` enters with those outputs *as outputs*,
and its random stream is advanced by its draws. A later turn of a session enters the same way: everything before it is
its prompt, so it may have draws without outputs. The scheduler's half is ``dora.worker.vllm.scheduler``.

The CPU sampler draws one ``torch.randint(0, 2**31)`` for each token of a seeded request (vllm/v1/sample/ops/
topk_topp_sampler.py, ``forward_cpu``). ``verify`` refuses samplers that draw differently.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch
import vllm.v1.worker.cpu_worker as cpu_worker
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from dora.engine_patches.patch import Patch, PatchFailed, nothing

NAME: Final = "exact_resume"
OUTPUTS_KEY: Final = "dora_outputs"  # key in SamplingParams.extra_args: the tokens sampled so far
# key in SamplingParams.extra_args: the prompt as an array, which copies faster than a list
PROMPT_KEY: Final = "dora_prompt"
DRAWS_KEY: Final = "dora_draws"  # key in SamplingParams.extra_args: the position in the random stream
_DRAW_LIMIT: Final = 2**31


def is_resumed(extra_args: Mapping[str, Any] | None) -> bool:
    return OUTPUTS_KEY in (extra_args or {})


def advance(generator: torch.Generator, draws: int) -> None:
    """Advances a request's random stream by the draws of ``draws`` sampled tokens."""
    torch.randint(0, _DRAW_LIMIT, (draws,), generator=generator, dtype=torch.long)


class ResumingModelRunner(CPUModelRunner):
    """vLLM's CPU model runner, extended to accept requests with outputs."""

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        for new in scheduler_output.scheduled_new_reqs:
            if is_resumed(new.sampling_params.extra_args):
                scheduler_output.finished_req_ids.discard(new.req_id)  # its turn before, of which nothing is left here
                self.input_batch.remove_request(new.req_id)
                self.requests[new.req_id] = self._resumed_state(new)
                if new.sampling_params.prompt_logprobs is not None:  # vLLM notes it of requests without a state
                    self.num_prompt_logprobs[new.req_id] = new.sampling_params.prompt_logprobs
        return super()._update_states(scheduler_output)

    def _update_streaming_request(self, req_id: str, new_req_data: NewRequestData) -> CachedRequestState:
        # vLLM's hook for a new request with existing state: it returns the state to add to the batch.
        if is_resumed(new_req_data.sampling_params.extra_args):
            return self.requests[req_id]
        return super()._update_streaming_request(req_id, new_req_data)

    def _resumed_state(self, new: NewRequestData) -> CachedRequestState:
        arguments = new.sampling_params.extra_args
        generator = None
        if new.sampling_params.temperature > 0:
            generator = torch.Generator(device=self.device)
            generator.manual_seed(new.sampling_params.seed)
            advance(generator, arguments[DRAWS_KEY])
        prompt = arguments[PROMPT_KEY]
        return CachedRequestState(
            req_id=new.req_id,
            # vLLM looks the logprobs of a prompt up by a tensor of these, which of an array would have 32 bits
            prompt_token_ids=prompt if new.sampling_params.prompt_logprobs is None else list(prompt),
            mm_features=[],
            sampling_params=new.sampling_params,
            generator=generator,
            block_ids=new.block_ids,
            num_computed_tokens=new.num_computed_tokens,
            output_token_ids=list(arguments[OUTPUTS_KEY]),
        )


def _apply() -> None:
    cpu_worker.CPUModelRunner = ResumingModelRunner  # the CPU worker creates its runner by this name


def _verify(runner: Any) -> None:
    if not isinstance(runner, ResumingModelRunner):
        raise PatchFailed(NAME, f"the model runner is {type(runner).__name__}")
    sampler = runner.sampler.topk_topp_sampler
    if sampler.forward != sampler.forward_cpu:
        raise PatchFailed(NAME, f"the sampler is {sampler.forward.__name__}, whose draws are not known")
    one_by_one, at_once = torch.Generator().manual_seed(7), torch.Generator().manual_seed(7)
    for _ in range(5):
        torch.randint(0, _DRAW_LIMIT, (1,), generator=one_by_one, dtype=torch.long)
    advance(at_once, 5)
    if not torch.equal(one_by_one.get_state(), at_once.get_state()):
        raise PatchFailed(NAME, "five draws at once do not advance the random stream as five single draws do")


PATCH = Patch(
    name=NAME,
    vllm_range=">=0.32,<0.33",
    reason="a resumed request must go on with its outputs as outputs and its random stream where it was",
    apply=_apply,
    verify=_verify,
    after_reload=nothing,
)
