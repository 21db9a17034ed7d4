"""The valid values of sampling parameters, for prompts, the configuration and engines.

The bounds are those within which vLLM samples as requested (``vllm/sampling_params.py``, ``SamplingParams``): it
refuses most values beyond them, silently raises a temperature between 0 and 0.01 to 0.01, and ignores top_p, top_k and
min_p at temperature 0. The record must say what was sampled, so the first case is refused here, and ``effective``
applies the second before anything is recorded.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from dora.data.limits import STOP_CHARACTERS_MAX, STOP_TOKENS_MAX, STOPS_MAX, TEMPERATURE_MAX, TEMPERATURE_MIN
from dora.data.strict_json import check_text
from dora.data.types import SamplingParams, SamplingValue
from dora.errors import InvalidValue, one_of


@dataclass(frozen=True, slots=True)
class Domain:
    """The values of one parameter, of ``kind`` from ``least`` to ``most``; none is between 0 and ``positive_least``."""

    kind: type[int] | type[float] | type[bool]
    least: float = 0.0
    most: float = 1.0
    positive_least: float = 0.0

    def of(self, value: Any, field: str) -> int | float | bool:
        """Returns ``value`` as ``kind``. An integer may stand for any number, a bool for none. Raises InvalidValue."""
        kinds = (int, float) if self.kind is float else (self.kind,)
        # Compared without conversion: an integer may be too large for a float.
        fits = type(value) in kinds and self.least <= value <= self.most and not 0 < value < self.positive_least
        if not fits:
            raise InvalidValue(field, value, self.allowed())
        return self.kind(value)

    def allowed(self) -> str:
        if self.kind is bool:
            return "true or false"
        if self.positive_least:
            return f"0, or a number from {self.positive_least:g} to {self.most:g}"
        least, most = (f"{bound:g}" if self.kind is float else str(bound) for bound in (self.least, self.most))
        return f"a {'whole ' if self.kind is int else ''}number from {least} to {most}"


@dataclass(frozen=True, slots=True)
class Listing:
    """Lists of one parameter: at most ``count_most`` texts of 1 to ``most`` characters, or token ids up to ``most``."""

    kind: type[str] | type[int]
    count_most: int
    most: int

    def of(self, value: Any, field: str) -> tuple[str, ...] | tuple[int, ...]:
        """Returns ``value`` as a tuple; a text stands for a list of one. Raises InvalidValue."""
        parts = [value] if self.kind is str and isinstance(value, str) else value
        if not isinstance(parts, list | tuple) or len(parts) > self.count_most or not all(map(self._fits, parts)):
            raise InvalidValue(field, value, self.allowed())
        if self.kind is str:
            for part in parts:
                check_text(part, field)
        return tuple(parts)

    def allowed(self) -> str:
        each = f"texts of 1 to {self.most} characters" if self.kind is str else "token ids of the model's vocabulary"
        return f"a list of at most {self.count_most} {each}"

    def _fits(self, part: Any) -> bool:
        if type(part) is not self.kind:
            return False
        return 1 <= len(part) <= self.most if isinstance(part, str) else 0 <= part <= self.most


DOMAINS: Final[Mapping[str, Domain]] = {
    "temperature": Domain(float, 0.0, TEMPERATURE_MAX, TEMPERATURE_MIN),
    "top_p": Domain(float, 1e-9, 1.0),
    "top_k": Domain(int, 0, (1 << 31) - 1),
    "min_p": Domain(float, 0.0, 1.0),
    "seed": Domain(int, 0, (1 << 63) - 1),
    "max_tokens": Domain(int, 1, 1 << 22),
    "min_tokens": Domain(int, 0, 1 << 22),
    "presence_penalty": Domain(float, -2.0, 2.0),
    "frequency_penalty": Domain(float, -2.0, 2.0),
    "repetition_penalty": Domain(float, 1e-9, 2.0),
    "ignore_eos": Domain(bool),
}
LISTS: Final[Mapping[str, Listing]] = {
    "stop": Listing(str, STOPS_MAX, STOP_CHARACTERS_MAX),
    "stop_token_ids": Listing(int, STOP_TOKENS_MAX, (1 << 31) - 1),
}
PARAMETERS: Final[Mapping[str, Domain | Listing]] = {**DOMAINS, **LISTS}
_GRAMMARS: Final = (
    *("structured_outputs", "guided_decoding", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("structural_tag", "response_format", "json_schema", "json_object", "json", "regex", "choice", "grammar"),
)
_ADAPTERS: Final = ("lora", "lora_request", "lora_name", "lora_path", "lora_int_id", "adapter", "adapter_name")
# Parameters of other services that this one refuses, with the reasons.
NOT_OFFERED: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        _GRAMMARS, "is structured output, which is not offered: a grammar's state cannot move with a request"
    ),
    **dict.fromkeys(_ADAPTERS, "is a LoRA adapter, which is not offered: a request has the weights of its version"),
}


def checked_overrides(overrides: Any, field: str) -> dict[str, SamplingValue]:
    """Returns a prompt's parameters with the right types. Raises InvalidValue for the first unknown or wrong one."""
    if not isinstance(overrides, Mapping):
        raise InvalidValue(field, overrides, "an object of sampling parameters")
    for name in overrides:
        if name in NOT_OFFERED:
            raise InvalidValue(f"{field}.{name}", overrides[name], f"one of {', '.join(PARAMETERS)}", NOT_OFFERED[name])
        if name not in PARAMETERS:
            raise InvalidValue(f"{field}.{name}", overrides[name], one_of(str(name), PARAMETERS))
    return {name: PARAMETERS[name].of(value, f"{field}.{name}") for name, value in overrides.items()}


def check_sampling(sampling: SamplingParams, field: str = "sampling", vocab_size: int = 0) -> None:
    """Raises InvalidValue for the first parameter that an engine would refuse or alter. ``vocab_size`` 0 is unknown."""
    for each in fields(sampling):
        PARAMETERS[each.name].of(getattr(sampling, each.name), f"{field}.{each.name}")
    for token_id in sampling.stop_token_ids:
        if vocab_size and token_id >= vocab_size:
            raise InvalidValue(f"{field}.stop_token_ids", token_id, f"token ids from 0 to {vocab_size - 1}")
    if sampling.min_tokens > sampling.max_tokens:
        raise InvalidValue(f"{field}.min_tokens", sampling.min_tokens, f"at most max_tokens = {sampling.max_tokens}")


def effective(sampling: SamplingParams) -> SamplingParams:
    """Returns what an engine applies: at temperature 0 it takes the likeliest token, whatever the truncation."""
    return replace(sampling, top_p=1.0, top_k=0, min_p=0.0) if sampling.temperature == 0.0 else sampling
