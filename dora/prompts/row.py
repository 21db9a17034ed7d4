"""Converts a row of a prompts file, as names and values, to a prompt. Errors name the location of the value.

Exactly one of
    prompt, text                 text, tokenized as it is, without a chat template
    prompt_token_ids, token_ids  list of token ids
    messages                     list of {"role", "content", ...}, for the model's chat template
and, each optional,
    prompt_id         unique in the source; default: "<file>:<row>"
    task_id           default: the source's name
    answer            any JSON value, passed to the reward function as verifier["answer"]
    verifier          object, passed to the reward function unchanged (except for "answer", if given)
    group_size        responses per prompt; 0: the service's default
    group_size_min    so many start at once, and the rest once two rewards differ; 0: the service's default
    sampling          object of SamplingParams fields, e.g. {"temperature": 0.7, "max_tokens": 64}
    priority          waiting prompts of the highest priority are admitted first; default: 0
    environment       drives its responses, which are sessions of several turns; default: none, single answers
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from dora.config import ColumnsConfig, PromptsConfig
from dora.data.limits import GROUP_SIZE_MAX, TEXT_BYTES_MAX
from dora.data.sampling import checked_overrides
from dora.data.types import Prompt
from dora.errors import MISSING, InvalidValue
from dora.prompts.check import check_name, check_priority, check_size, check_verifier, checked_messages
from dora.prompts.tokenizer import ChatTokenizer

FORMS: Final = ("prompt", "prompt_token_ids", "messages")
FIELDS: Final = tuple(ColumnsConfig.model_fields)
OWN_NAMES: Final = {**{name: (name,) for name in FIELDS}, "prompt": ("prompt", "text")} | {
    "prompt_token_ids": ("prompt_token_ids", "token_ids")
}
VERIFIER_KB: Final[int] = PromptsConfig().verifier_kb
OtherColumns = Literal["refuse", "ignore", "verifier"]


@dataclass(frozen=True, slots=True)
class Columns:
    """The mapping of fields to columns, and the treatment of other columns."""

    named: Mapping[str, str]  # field -> column; other fields have columns of their own names
    others: OtherColumns

    @classmethod
    def of(cls, columns: ColumnsConfig, others: OtherColumns) -> "Columns":
        return cls({name: column for name, column in columns if column}, others)

    def used(self, present: Mapping[str, Any], place: "RowLocation") -> dict[str, str]:
        """Maps fields to the columns present in a row. Raises InvalidValue for a missing or conflicting column."""
        used: dict[str, str] = {}
        for name in FIELDS:
            if name in self.named:
                if self.named[name] not in present:
                    allowed = f"a column of every row, because prompts.columns.{name} names it"
                    raise place.invalid(self.named[name], MISSING, f"{allowed}; this one has {', '.join(present)}")
                used[name] = self.named[name]
                continue
            found = [each for each in OWN_NAMES[name] if each in present and each not in self.named.values()]
            if len(found) > 1:
                raise place.invalid(found[1], present[found[1]], f"left out, because the row also has {found[0]}")
            if found:
                used[name] = found[0]
        return used


@dataclass(frozen=True, slots=True)
class RowLocation:
    """A row of a file (0 is the whole file), to be named in errors. ``columns`` maps fields to columns of this row."""

    path: Path
    number: int
    columns: Mapping[str, str] = field(default_factory=dict)

    def of(self, name: str) -> str:
        row = f":{self.number}" if self.number else ""
        return f"{self.path}{row}: {self.columns.get(name, name)}"

    def invalid(self, name: str, value: object, allowed: str) -> InvalidValue:
        return InvalidValue(self.of(name), value, allowed)


def prompt_of_row(
    row: Mapping[str, Any],
    place: RowLocation,
    others: OtherColumns,
    tokenizer: ChatTokenizer,
    source: str,
    number: int,
    verifier_kb: int = VERIFIER_KB,
) -> Prompt:
    """Converts a row. Raises InvalidValue, with the file, row and column of the first invalid value.

    ``number`` is the row's number in its source, used as the id of a prompt without one. ``verifier_kb`` limits its
    verifier (``prompts.verifier_kb``).
    """
    record = {name: row[column] for name, column in place.columns.items() if column in row}
    further = {name: value for name, value in row.items() if name not in place.columns.values()}
    if others == "refuse":
        for unknown in sorted(further, key=str):
            allowed = f"only the fields {', '.join(FIELDS)}"
            hint = "set prompts.columns to map a column to a field, or prompts.other_columns to accept the rest"
            raise place.invalid(str(unknown), further[unknown], f"{allowed}; {hint}")
    if not any(form in record for form in FORMS):
        allowed = f"exactly one of {', '.join(FORMS)}, or a column mapped to one by prompts.columns"
        raise place.invalid("prompt", MISSING, f"{allowed}; this row has {', '.join(map(str, row)) or 'nothing'}")
    text, token_ids = _tokens(record, place, tokenizer)
    if not token_ids:
        raise place.invalid(next(form for form in FORMS if form in record), "(no token)", "at least one token long")
    prompt_id = _field(record, "prompt_id", str, f"{source}:{number}", place)
    task_id = _field(record, "task_id", str, source, place)
    verifier_json = _verifier_json(record, further if others == "verifier" else {}, place)
    priority = _field(record, "priority", int, 0, place)
    environment = _field(record, "environment", str, "", place) if "environment" in record else ""
    check_name(prompt_id, place.of("prompt_id"))
    check_name(task_id, place.of("task_id"))
    check_verifier(verifier_json, f"{place.path}:{place.number}", verifier_kb)
    check_priority(priority, place.of("priority"))
    if environment:
        check_name(environment, place.of("environment"))
    return Prompt(
        prompt_id=prompt_id,
        task_id=task_id,
        token_ids=token_ids,
        text=text,
        group_size=_group_size(record, "group_size", place),
        sampling=checked_overrides(_field(record, "sampling", dict, {}, place), place.of("sampling")),
        verifier_json=verifier_json,
        priority=priority,
        environment=environment,
        group_size_min=_group_size(record, "group_size_min", place),
    )


def without_nulls(row: Mapping[str, Any], used: Mapping[str, str]) -> dict[str, Any]:
    """Removes nulls, which stand for missing fields. Only ``answer`` may be null."""
    answer = used.get("answer")
    return {name: value for name, value in row.items() if value is not None or name == answer}


def _tokens(record: dict[str, Any], place: RowLocation, tokenizer: ChatTokenizer) -> tuple[str, tuple[int, ...]]:
    forms = [form for form in FORMS if form in record]
    if len(forms) != 1:
        found = [place.columns[form] for form in forms]
        raise place.invalid("prompt", found, f"exactly one of {', '.join(FORMS)}")
    if forms == ["prompt"]:
        text = _field(record, "prompt", str, "", place)
        check_size(text, place.of("prompt"), TEXT_BYTES_MAX)
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


def _group_size(record: dict[str, Any], name: str, place: RowLocation) -> int:
    value: int = _field(record, name, int, 0, place)
    if not 0 <= value <= GROUP_SIZE_MAX:
        raise place.invalid(name, value, f"an integer from 0 to {GROUP_SIZE_MAX} (0: the service's default)")
    return value


def _verifier_json(record: dict[str, Any], others: dict[str, Any], place: RowLocation) -> str:
    verifier = {**others, **_field(record, "verifier", dict, {}, place)}
    if "answer" in record:
        verifier["answer"] = record["answer"]
    try:
        return json.dumps(verifier, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        name, value = next((each for each in verifier.items() if not _is_json(each[1])), ("verifier", verifier))
        raise place.invalid(name, value, "a JSON value") from None


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _field(record: dict[str, Any], name: str, kind: type, default: Any, place: RowLocation) -> Any:
    value = record.get(name, default)
    if type(value) is not kind or (kind is str and not value):
        names = {str: "a non-empty text", int: "an integer", dict: "an object"}
        raise place.invalid(name, value, names[kind])
    return value
