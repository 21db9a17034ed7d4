"""Requests for turns, checked: each field of a body is offered, or refused by name. None is ignored.

A field that would change what the logprobs mean, such as a grammar or a bias, is refused: a policy is trained on the
tokens that it would have sampled.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from dora.agents.chat.message import Message, checked_chat, checked_tools
from dora.agents.chat.rendering import Rendered
from dora.data.sampling import NOT_OFFERED, PARAMETERS
from dora.errors import MISSING, InvalidValue, one_of
from dora.prompts.template import RESERVED

CHOICES_MAX: Final = 128
MODEL: Final = "policy"
_SAMPLING: Final = frozenset(PARAMETERS) - {"max_tokens"}
# Values that say no more than that a field is not used, and why another value is refused.
_UNUSED: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "logit_bias": ((None, {}), "would change the logprobs that the policy is trained on"),
    "response_format": ((None, {"type": "text"}), "is structured output: a grammar's state cannot move with a request"),
    "top_logprobs": ((None, 0), "is not kept: a turn has the logprobs of its sampled tokens"),
    "prompt_logprobs": ((None, False), "is of /v1/completions and /inference/v1/generate"),
    "best_of": ((None, 1), "would hide samples that the policy is trained on: use n"),
    "suffix": ((None, ""), "is not offered"),
    "echo": ((None, False), "is not offered"),
    "prefix": ((None, False), "is not offered"),
    "chat_template": ((None,), "is the service's: the model's own"),
    "continue_final_message": ((None, False), "is not offered: an answer cannot be prefilled"),
    "add_generation_prompt": ((None, True), "is not offered: every request asks for an answer"),
    "include_stop_str_in_output": ((None, False), "is not offered: token_ids have the stop"),
    "skip_special_tokens": ((None, True), "is not offered: ask for the token ids, which have them"),
    "parallel_tool_calls": ((None, True), "cannot be enforced without a grammar"),
    "modalities": ((None, ["text"]), "is not offered"),
    "audio": ((None,), "is not offered"),
    "prediction": ((None,), "is not offered"),
    "function_call": ((None, "auto", "none"), "is not offered: use tools"),
    "functions": ((None, []), "is not offered: use tools"),
    "web_search_options": ((None,), "is not offered"),
    "priority": ((None, 0), "is not offered"),
    "use_beam_search": ((None, False), "is not offered: it samples nothing"),
    "length_penalty": ((None, 1, 1.0), "is not offered"),
    "allowed_token_ids": ((None,), "would change the logprobs that the policy is trained on"),
    "bad_words": ((None, []), "would change the logprobs that the policy is trained on"),
    "truncate_prompt_tokens": ((None,), "is not offered: no token of a history is dropped"),
    "features": ((None,), "is not offered: prompts are tokens of text"),
    "content_parts": ((None,), "is not offered: prompts are tokens of text"),
    "kv_transfer_params": ((None,), "is the service's"),
    "sampling_mask": ((None, False), "is not offered"),
    "logits_processors": ((None, []), "would change the logprobs that the policy is trained on"),
    **{name: ((None,), why) for name, why in NOT_OFFERED.items() if name != "response_format"},
}
# Fields without an effect on what is sampled: labels, and hints for caches.
_LABELS: Final = frozenset(
    (
        *(
            "user",
            "metadata",
            "store",
            "service_tier",
            "safety_identifier",
            "prompt_cache_key",
            "cache_salt",
            "verbosity",
        ),
        *("prompt_cache_retention", "request_id", "session_id", "detokenize", "spaces_between_special_tokens"),
        *("output_kind", "logprob_token_ids", "reasoning_ended", "routed_experts_prompt_start"),
    )
)


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A request for turns. It has ``messages``, or ``token_ids``.

    ``sampling`` has the parameters that the body gives, except ``max_tokens`` (0 for the service's).
    """

    model: str = MODEL
    messages: Sequence[Message] = ()
    token_ids: Sequence[int] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    options: Mapping[str, Any] = field(default_factory=dict)  # of the chat template
    calls: bool = False  # text of the reply may be tool calls
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int = 0
    choices: int = 1
    stream: bool = False
    usage: bool = False  # a last chunk of a stream has the usage
    logprobs: bool = False
    returns_ids: bool = False
    names_ids: bool = False  # tokens of logprobs are named by their ids
    is_text: bool = False  # the reply's text is wanted; a chat's always is
    prompt_logprobs: bool = False  # the first choice has those of the prompt's tokens
    prompt: Rendered | None = None  # the chat as a prompt of its own, if it was rendered

    def sampling_of(self, choice: int) -> dict[str, Any]:
        """Returns the parameters of one choice. The first has the seed of the body. The others' seeds follow from it;
        with the same seed they would be equal.
        """
        if "seed" not in self.sampling or not choice:
            return dict(self.sampling)
        digest = hashlib.blake2b(f"{self.sampling['seed']}/{choice}".encode(), digest_size=8).digest()
        return {**self.sampling, "seed": int.from_bytes(digest, "big") >> 2}

    @property
    def first_of_session(self) -> dict[str, Any]:
        """The parameters of a session that this request opens. A seed belongs to the turn alone."""
        return {name: value for name, value in self.sampling.items() if name != "seed"}


def chat_request(body: Mapping[str, Any]) -> TurnRequest:
    """Returns the request of ``/v1/chat/completions``. Raises InvalidValue, naming the field."""
    reader = _Reader(body)
    messages = checked_chat(reader.required("messages"))
    tools = checked_tools(reader.get("tools"))
    choice = reader.get("tool_choice")
    if choice not in (None, "auto", "none"):
        why = "cannot be enforced without a grammar"
        raise InvalidValue("tool_choice", choice, "auto or none", why)
    options = dict(reader.typed("chat_template_kwargs", dict, {}))
    for name in RESERVED & options.keys():
        why = "is the request's, or a function of the template"
        raise InvalidValue(f"chat_template_kwargs.{name}", options[name], "left out", why)
    effort = reader.typed("reasoning_effort", str, "")
    if effort:
        options["reasoning_effort"] = effort
    return reader.request(
        messages=messages,
        tools=tools if choice != "none" else [],
        calls=bool(tools) and choice != "none",
        options=options,
        logprobs=reader.typed("logprobs", bool, False),
    )


def completion_requests(body: Mapping[str, Any], encode: Callable[[str], Sequence[int]]) -> tuple[TurnRequest, ...]:
    """Returns the requests of ``/v1/completions``, one for each prompt. Raises InvalidValue, naming the field."""
    reader = _Reader(body)
    prompts = _prompts(reader.required("prompt"), encode)
    logprobs = reader.get("logprobs")
    if logprobs not in (None, 0, 1):
        raise InvalidValue("logprobs", logprobs, "0 or 1: a turn has the logprobs of its sampled tokens")
    options: dict[str, Any] = {"logprobs": logprobs is not None, "is_text": True}
    options["prompt_logprobs"] = reader.wants_prompt(body.get("stream"))
    return tuple(_Reader(body, reader.read).request(token_ids=token_ids, **options) for token_ids in prompts)


def generate_request(body: Mapping[str, Any]) -> TurnRequest:
    """Returns the request of vLLM's ``/inference/v1/generate``. Raises InvalidValue, naming the field."""
    reader = _Reader(body)
    token_ids = checked_ids(reader.required("token_ids"), "token_ids")
    mode = reader.get("output_mode")
    if mode not in (None, "tokens"):
        raise InvalidValue("output_mode", mode, "tokens")
    reader.typed("stream_options", dict, {})
    nested = reader.typed("sampling_params", dict, {})
    inner = _Reader(nested, prefix="sampling_params.")
    inner.typed("skip_special_tokens", bool, True)  # of text, which this route does not return
    logprobs = inner.get("logprobs")
    if logprobs not in (None, 0, 1):
        why = "is not kept: a turn has the logprobs of its sampled tokens"
        raise InvalidValue("sampling_params.logprobs", logprobs, "0 or 1", why)
    prompt_logprobs = inner.wants_prompt(body.get("stream"))
    found = inner.request(logprobs=logprobs is not None, token_ids=token_ids)
    for name in ("model", "stream", "stream_options", "return_token_ids"):
        if nested.get(name) is not None:
            raise InvalidValue(f"sampling_params.{name}", nested[name], f"given as {name}, beside sampling_params")
    for name in (*PARAMETERS, "max_completion_tokens", "n"):
        if body.get(name) is not None:
            raise InvalidValue(name, body[name], f"given as sampling_params.{name}")
    outer = reader.request(token_ids=token_ids)
    return TurnRequest(
        outer.model,
        token_ids=token_ids,
        sampling=found.sampling,
        max_tokens=found.max_tokens,
        choices=found.choices,
        stream=outer.stream,
        logprobs=found.logprobs,
        returns_ids=outer.returns_ids,
        prompt_logprobs=prompt_logprobs,
    )


def version_of(model: str) -> int | None:
    """Returns the version that ``policy-v17`` names, or None for other names, such as ``policy``, the newest."""
    name, _, version = model.partition("-v")
    if name == MODEL and version.isascii() and version.isdigit() and len(version) < 20:
        return int(version)
    return None


def checked_ids(value: Any, field: str) -> list[int]:
    """Returns a list of at least one token id. Raises InvalidValue."""
    if not isinstance(value, list) or not value:
        raise InvalidValue(field, value, "a list of at least one token id")
    if not all(type(each) is int and 0 <= each < 1 << 31 for each in value):
        wrong = next(each for each in value if type(each) is not int or not 0 <= each < 1 << 31)
        raise InvalidValue(field, wrong, "whole numbers from 0 to 2147483647")
    return value


def _prompts(value: Any, encode: Callable[[str], Sequence[int]]) -> list[Sequence[int]]:
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list) and value and type(value[0]) is int:
        value = [value]
    if not isinstance(value, list) or not 1 <= len(value) <= CHOICES_MAX:
        raise InvalidValue("prompt", value, f"a text, a list of token ids, or a list of at most {CHOICES_MAX} of these")
    found = [encode(each) if isinstance(each, str) else each for each in value]
    return [
        checked_ids(list(each) if isinstance(each, tuple) else each, f"prompt[{n}]") for n, each in enumerate(found)
    ]


class _Reader:
    """Reads the fields of one body, and refuses those that nobody read."""

    def __init__(self, body: Mapping[str, Any], read: set[str] | None = None, prefix: str = "") -> None:
        self._body = body
        self._prefix = prefix
        self.read = set() if read is None else set(read)

    def get(self, name: str) -> Any:
        self.read.add(name)
        return self._body.get(name)

    def required(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise InvalidValue(self._prefix + name, MISSING, "in the body")
        return value

    def typed(self, name: str, kind: type, default: Any) -> Any:
        value = self.get(name)
        if value is None:
            return default
        if type(value) is not kind:
            words = {dict: "an object", bool: "true or false", str: "a text", int: "a whole number"}
            raise InvalidValue(self._prefix + name, value, words[kind])
        return value

    def wants_prompt(self, stream: Any) -> bool:
        """Reads vLLM's ``prompt_logprobs``: how many likeliest tokens a position has beside the prompt's own."""
        value = self.get("prompt_logprobs")
        if value is None or value is False:
            return False
        field = self._prefix + "prompt_logprobs"
        if type(value) is not int or value:
            raise InvalidValue(field, value, "0, or left out", "is not kept: of a prompt's tokens there are their own")
        if stream:
            raise InvalidValue(field, value, "left out of a stream", "comes with a whole reply alone, as vLLM's does")
        return True

    def request(self, **parts: Any) -> TurnRequest:
        sampling = {name: self._parameter(name) for name in sorted(_SAMPLING) if self.get(name) is not None}
        limits = [self._limit(name) for name in ("max_completion_tokens", "max_tokens")]
        choices = self.typed("n", int, 1)
        if not 1 <= choices <= CHOICES_MAX:
            raise InvalidValue(f"{self._prefix}n", choices, f"1 to {CHOICES_MAX}")
        found = TurnRequest(
            model=self.typed("model", str, MODEL),
            sampling=sampling,
            max_tokens=limits[0] or limits[1],
            choices=choices,
            stream=self.typed("stream", bool, False),
            usage=bool(self.typed("stream_options", dict, {}).get("include_usage")),
            returns_ids=self.typed("return_token_ids", bool, False),
            names_ids=self.typed("return_tokens_as_token_ids", bool, False),
            **parts,
        )
        self._refuse_rest()
        return found

    def _parameter(self, name: str) -> Any:
        value = self._body[name]
        if name == "top_k" and value == -1:  # vLLM's and Tinker's "no limit"
            value = 0
        return PARAMETERS[name].of(value, self._prefix + name)

    def _limit(self, name: str) -> int:
        value = self.get(name)
        return 0 if value is None else int(PARAMETERS["max_tokens"].of(value, self._prefix + name))  # type: ignore[arg-type]

    def _refuse_rest(self) -> None:
        for name, value in self._body.items():
            if name in self.read or name in _LABELS:
                continue
            if name not in _UNUSED:
                known = sorted({*self.read, *_LABELS})
                raise InvalidValue(self._prefix + name, value, one_of(name, known), "is not a field of this route")
            unused, why = _UNUSED[name]
            if not any(type(value) is type(each) and value == each for each in unused):
                raise InvalidValue(self._prefix + name, value, "left out", why)
