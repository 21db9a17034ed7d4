"""Prompts from a JSON Lines file, read, checked and tokenised once, before anything starts.

One object a line, in UTF-8; a byte-order mark, Windows' line ends and blank lines are passed over. Exactly one of
    prompt            text, tokenised as it stands, without a chat template
    prompt_token_ids  list of token ids
    messages          list of {"role", "content", ...}, put through the model's chat template
and, each optional,
    prompt_id         unique in the file; by default "<file>:<line>"
    task_id           by default the file's name without ending
    answer            any JSON value, given to the reward function as verifier["answer"]
    verifier          object, given to the reward function as it is (with "answer" added where there is one)
    group_size        responses to this prompt; 0: the service's default
    sampling          object of SamplingParams fields, e.g. {"temperature": 0.7, "max_tokens": 64}
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, Final

from dora.errors import Conflict, InvalidValue
from dora.prompts.check import check_name, check_verifier, checked_messages
from dora.prompts.source import PromptSource, check_length
from dora.prompts.tokenizer import ChatTokenizer
from dora.sampling import checked_overrides
from dora.strict_json import read_json
from dora.types import Prompt

REWARD = "dora.rewards.answer:score"
_FORMS = ("prompt", "prompt_token_ids", "messages")
_FIELDS = (*_FORMS, "prompt_id", "task_id", "answer", "verifier", "group_size", "sampling")
LINE_BYTES_MOST: Final = 8 << 20


def jsonl_source(path: Path, tokenizer: ChatTokenizer, limit_tokens: int | None = None) -> PromptSource:
    """The prompts of a file, in its order.

    Raises InvalidValue with the file and the line number for the first malformed line, Conflict for an id that
    appeared before.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValue("--prompts", str(path), f"a readable UTF-8 file ({error})") from error
    prompts: list[Prompt] = []
    lines_by_id: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):  # a text in JSON may hold any other line separator
        if not line.strip():
            continue
        prompt = check_length(_prompt(line, _Place(path, number), tokenizer), limit_tokens)
        if prompt.prompt_id in lines_by_id:
            first = lines_by_id[prompt.prompt_id]
            why = f"is used in line {first} already"
            raise Conflict(f"{path}:{number}: prompt_id", prompt.prompt_id, "an id not used before", why)
        lines_by_id[prompt.prompt_id] = number
        prompts.append(prompt)
    if not prompts:
        raise InvalidValue("--prompts", str(path), "a file with at least one prompt")
    return PromptSource(path.stem, REWARD, lambda index: prompts[index] if index < len(prompts) else None)


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """A line of a file, to name in errors."""

    path: Path
    number: int

    def of(self, field: str) -> str:
        return f"{self.path}:{self.number}: {field}"

    def invalid(self, field: str, value: object, allowed: str) -> InvalidValue:
        return InvalidValue(self.of(field), value, allowed)


def _prompt(line: str, place: _Place, tokenizer: ChatTokenizer) -> Prompt:
    try:
        record = read_json(line, place.of("line"), LINE_BYTES_MOST)
    except InvalidValue as error:
        raise place.invalid("line", error.value, f"one JSON object: {error.allowed}") from error
    if not isinstance(record, dict):
        raise place.invalid("line", line[:80], "one JSON object")
    for unknown in sorted(set(record) - set(_FIELDS)):
        raise place.invalid(unknown, record[unknown], f"only the fields {', '.join(_FIELDS)}")
    text, token_ids = _tokens(record, place, tokenizer)
    prompt_id = _field(record, "prompt_id", str, f"{place.path.stem}:{place.number}", place)
    task_id = _field(record, "task_id", str, place.path.stem, place)
    verifier_json = _verifier_json(record, place)
    check_name(prompt_id, place.of("prompt_id"))
    check_name(task_id, place.of("task_id"))
    check_verifier(verifier_json, f"{place.path}:{place.number}")
    return Prompt(
        prompt_id=prompt_id,
        task_id=task_id,
        token_ids=token_ids,
        text=text,
        group_size=_group_size(record, place),
        sampling=checked_overrides(_field(record, "sampling", dict, {}, place), place.of("sampling")),
        verifier_json=verifier_json,
    )


def _tokens(record: dict[str, Any], place: _Place, tokenizer: ChatTokenizer) -> tuple[str, tuple[int, ...]]:
    forms = [form for form in _FORMS if form in record]
    if len(forms) != 1:
        raise place.invalid("prompt", forms, f"exactly one of {', '.join(_FORMS)}")
    if forms == ["prompt"]:
        text = _field(record, "prompt", str, "", place)
        return text, tokenizer.encode(text)
    if forms == ["messages"]:
        messages = checked_messages(record["messages"], place.of("messages"))
        try:
            return tokenizer.encode_chat(messages)
        except InvalidValue as error:
            raise place.invalid(error.field, error.value, error.allowed) from error
    token_ids = record["prompt_token_ids"]
    if not isinstance(token_ids, list):
        raise place.invalid("prompt_token_ids", token_ids, "a list of token ids")
    for token_id in token_ids:
        if type(token_id) is not int or not 0 <= token_id <= tokenizer.largest_id:
            raise place.invalid("prompt_token_ids", token_id, f"integers from 0 to {tokenizer.largest_id}")
    return tokenizer.decode(token_ids), tuple(token_ids)


def _group_size(record: dict[str, Any], place: _Place) -> int:
    value = _field(record, "group_size", int, 0, place)
    if value < 0:
        raise place.invalid("group_size", value, "an integer from 0 on (0: the service's default)")
    return value


def _verifier_json(record: dict[str, Any], place: _Place) -> str:
    verifier = dict(_field(record, "verifier", dict, {}, place))
    if "answer" in record:
        verifier["answer"] = record["answer"]
    return json.dumps(verifier)


def _field(record: dict[str, Any], name: str, kind: type, default: Any, place: _Place) -> Any:
    value = record.get(name, default)
    if type(value) is not kind or (kind is str and not value):
        names = {str: "a text that is not empty", int: "an integer", dict: "an object"}
        raise place.invalid(name, value, names[kind])
    return value
