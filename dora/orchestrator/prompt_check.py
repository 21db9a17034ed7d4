"""What a prompt must be like, so that some engine can generate its responses and a message can deliver them."""

from dataclasses import replace

from dora.config import Config
from dora.errors import InvalidValue, one_of
from dora.limits import GROUP_SIZE_MOST
from dora.orchestrator.book import sampling_of
from dora.rpc.convert import trajectory_bytes_most
from dora.types import Prompt, SamplingParams

_SAMPLING_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 10.0),
    "top_p": (1e-9, 1.0),
    "top_k": (0, (1 << 31) - 1),
    "min_p": (0.0, 1.0),
    "seed": (0, (1 << 63) - 1),
    "max_tokens": (1, 1 << 22),
    "min_tokens": (0, 1 << 22),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-9, 2.0),
    "ignore_eos": (0, 1),
}
_WHOLE = frozenset({"top_k", "seed", "max_tokens", "min_tokens", "ignore_eos"})


def checked(prompt: Prompt, config: Config) -> Prompt:
    """The prompt with its group size filled in. Raises InvalidValue where no engine could generate it."""
    if not prompt.prompt_id:
        raise InvalidValue("prompt_id", "", "a non-empty id")
    if not prompt.token_ids:
        raise InvalidValue(f"prompt {prompt.prompt_id}: token_ids", "(none)", "at least one token")
    group_size = prompt.group_size or config.rollout.group_size
    if not 1 <= group_size <= GROUP_SIZE_MOST:
        raise InvalidValue(f"prompt {prompt.prompt_id}: group_size", group_size, f"1 to {GROUP_SIZE_MOST}")
    sampling = _checked_sampling(prompt, config)
    limit = config.workers.max_model_len_tokens
    if len(prompt.token_ids) + sampling.max_tokens > limit:
        raise InvalidValue(
            f"prompt {prompt.prompt_id}: tokens",
            len(prompt.token_ids),
            f"at most {limit - sampling.max_tokens}: workers.max_model_len_tokens {limit} "
            f"less max_tokens {sampling.max_tokens}",
        )
    most = trajectory_bytes_most(len(prompt.token_ids), sampling.max_tokens)
    limit_bytes = config.service.max_message_bytes
    if most > limit_bytes:  # it could be generated, and never be delivered
        allowed = f"such that a trajectory fits into service.max_message_bytes {limit_bytes}: it may take {most}"
        raise InvalidValue(f"prompt {prompt.prompt_id}: sampling.max_tokens", sampling.max_tokens, allowed)
    return replace(prompt, group_size=group_size)


def _checked_sampling(prompt: Prompt, config: Config) -> SamplingParams:
    for name, value in prompt.sampling.items():
        if name not in _SAMPLING_RANGES:
            raise InvalidValue(f"prompt {prompt.prompt_id}: sampling.{name}", value, one_of(name, _SAMPLING_RANGES))
        low, high = _SAMPLING_RANGES[name]
        whole = name in _WHOLE
        if not isinstance(value, int if whole else (int, float)) or not low <= value <= high:
            allowed = f"{low:g} to {high:g}" + ", whole" * whole
            raise InvalidValue(f"prompt {prompt.prompt_id}: sampling.{name}", value, allowed)
    sampling = sampling_of(config.rollout, prompt)
    if sampling.min_tokens > sampling.max_tokens:
        allowed = f"at most max_tokens = {sampling.max_tokens}"
        raise InvalidValue(f"prompt {prompt.prompt_id}: sampling.min_tokens", sampling.min_tokens, allowed)
    return sampling
