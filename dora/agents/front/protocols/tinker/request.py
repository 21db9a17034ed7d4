"""Names of weights and of sampling sessions, and requests for samples, checked: each field is offered, or refused."""

import hashlib
import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from dora.agents.front.request import CHOICES_MAX, MODEL, TurnRequest, checked_ids, generate_request
from dora.errors import MISSING, InvalidValue, one_of

SCHEME: Final = "tinker://"
WEIGHTS: Final = "/sampler_weights/"
_NAMES: Final = f"{SCHEME}RUN{WEIGHTS}NAME, whose NAME is {MODEL} or {MODEL}-vN"
_SESSION: Final = re.compile(r"tinker-[0-9a-f]{32}")
_SEQUENCE_MAX: Final = 1 << 63
_UNCOUNTED: Final = "is not kept: a sample has the logprobs of its tokens"
_SCORED: Final = "is not kept: of a prompt's tokens there are their own logprobs"
# Values that say no more than that a field is not used, and why another value is refused.
_UNUSED: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "topk_prompt_logprobs": ((None, 0), _SCORED),
    "target_prompt_logprobs": ((None,), _SCORED),
    "topk_sample_logprobs": ((None, 0), _UNCOUNTED),
    "prompt_alt_tokens_k": ((None, 0), "is not offered: a sample follows its prompt"),
    "record_stability_info": ((None, False), "is not offered: the service records every sample"),
}
_FIELDS: Final = (
    *("type", "num_samples", "prompt", "sampling_params", "model_path", "base_model"),
    *("sampling_session_id", "seq_id", "prompt_logprobs", "prompt_logprobs_last_n"),
)
_PARAMETERS: Final = ("max_tokens", "seed", "stop", "temperature", "top_k", "top_p")


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A request for a sample. Its retries have the same ``name``, and ``digest`` covers all that it asks. ``scored`` is
    the number of last tokens of the prompt whose logprobs are wanted.
    """

    name: str
    digest: bytes
    requested: TurnRequest
    scored: int = 0


def new_session() -> str:
    return f"tinker-{uuid.uuid4().hex}"


def is_session(session_id: str) -> bool:
    return _SESSION.fullmatch(session_id) is not None


def sampler_name(session_id: str, number: int, model: str) -> str:
    """Names a sampling session. The name says all that the front knows of it: no front has to keep it."""
    return f"{session_id}.{number}.{model}"


def sampler_model(sampler: str) -> str:
    """Returns the model of a sampling session. Raises InvalidValue."""
    session_id, _, rest = sampler.partition(".")
    number, _, model = rest.partition(".")
    if not is_session(session_id) or not number.isascii() or not number.isdigit() or not model:
        raise InvalidValue("sampling_session_id", sampler, "as create_sampling_session has answered")
    return model


def is_sample(name: str) -> bool:
    """Returns whether a future can have this name."""
    sampler, _, number = name.rpartition(".")
    return is_session(sampler.partition(".")[0]) and sampler.count(".") > 1 and number.isascii() and number.isdigit()


def requested_model(body: Mapping[str, Any]) -> str:
    """Returns the model that ``model_path``, or else ``base_model``, names. Raises InvalidValue."""
    path, base = _text(body, "model_path"), _text(body, "base_model")
    if not path:
        return base or MODEL
    if not path.startswith(SCHEME):
        return path
    run, _, name = path.removeprefix(SCHEME).partition(WEIGHTS)
    if not run or not name or "/" in run + name:
        raise InvalidValue("model_path", path, _NAMES)
    return name


def number_of(body: Mapping[str, Any], name: str) -> int:
    """Returns a sequence number. Raises InvalidValue."""
    value = body.get(name)
    if type(value) is not int or not 0 <= value < _SEQUENCE_MAX:
        raise InvalidValue(name, MISSING if value is None else value, "a whole number from 0")
    return value


def text_of(body: Mapping[str, Any], name: str) -> str:
    """Returns a text that must be there. Raises InvalidValue."""
    found = _text(body, name)
    if not found:
        raise InvalidValue(name, MISSING, "in the body")
    return found


def sample_request(body: Mapping[str, Any]) -> SampleRequest:
    """Returns the request of ``asample``. Raises InvalidValue, naming the field."""
    for name, value in body.items():
        if name in _FIELDS:
            continue
        if name not in _UNUSED:
            raise InvalidValue(name, value, one_of(name, (*_FIELDS, *_UNUSED)), "is not a field of this route")
        unused, why = _UNUSED[name]
        if not any(type(value) is type(each) and value == each for each in unused):
            raise InvalidValue(name, value, "left out", why)
    samples = body.get("num_samples", 1)
    if type(samples) is not int or not 1 <= samples <= CHOICES_MAX:
        raise InvalidValue("num_samples", samples, f"a whole number from 1 to {CHOICES_MAX}")
    sampler = _text(body, "sampling_session_id")
    if sampler:
        model, name = sampler_model(sampler), f"{sampler}.{number_of(body, 'seq_id')}"
    else:
        model, name = requested_model(body), f"{new_session()}.one"
    generate = {"token_ids": _tokens(body.get("prompt")), "sampling_params": _parameters(body.get("sampling_params"))}
    scored = _scored(body, len(generate["token_ids"]))
    options: dict[str, Any] = {"logprobs": True, "prompt_logprobs": bool(scored)}
    requested = replace(generate_request(generate), model=model, choices=samples, **options)
    return SampleRequest(name, hashlib.sha256(json.dumps(body, sort_keys=True).encode()).digest(), requested, scored)


def _scored(body: Mapping[str, Any], prompt_tokens: int) -> int:
    """Returns the number of last tokens of the prompt whose logprobs are wanted. Raises InvalidValue."""
    wants, last = body.get("prompt_logprobs"), body.get("prompt_logprobs_last_n")
    if not isinstance(wants, bool | None):
        raise InvalidValue("prompt_logprobs", wants, "true or false")
    if last is None:
        return prompt_tokens if wants else 0
    if not wants:
        raise InvalidValue("prompt_logprobs_last_n", last, "left out without prompt_logprobs")
    if type(last) is not int or not 1 <= last < prompt_tokens:
        allowed = f"a whole number from 1 to {prompt_tokens - 1}, the prompt's tokens but the first"
        raise InvalidValue("prompt_logprobs_last_n", last, allowed)
    return last


def _tokens(prompt: Any) -> list[int]:
    chunks = prompt.get("chunks") if isinstance(prompt, dict) else None
    if not isinstance(chunks, list) or not chunks:
        raise InvalidValue("prompt.chunks", MISSING if chunks is None else chunks, "a list of at least one chunk")
    found: list[int] = []
    for place, chunk in enumerate(chunks):
        kind = chunk.get("type", "encoded_text") if isinstance(chunk, dict) else None
        if kind != "encoded_text":
            raise InvalidValue(f"prompt.chunks[{place}].type", kind, "encoded_text: prompts are tokens of text")
        found += checked_ids(chunk.get("tokens"), f"prompt.chunks[{place}].tokens")
    return found


def _parameters(params: Any) -> dict[str, Any]:
    """Returns sampling parameters by DORA's names. A ``stop`` without entries switches off the model's own ends."""
    if params is not None and not isinstance(params, dict):
        raise InvalidValue("sampling_params", params, "an object")
    found = dict(params or {})
    for name, value in found.items():
        if name not in _PARAMETERS:
            raise InvalidValue(
                f"sampling_params.{name}", value, one_of(name, _PARAMETERS), "is not a sampling parameter"
            )
    stop = found.pop("stop", None)
    if stop == []:
        found["ignore_eos"] = True
    elif isinstance(stop, list) and all(type(each) is int for each in stop):
        found["stop_token_ids"] = stop
    elif stop is not None:
        found["stop"] = stop
    return found


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidValue(name, value, "a text")
    return value or ""
