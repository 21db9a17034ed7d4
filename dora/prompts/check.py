"""Checks of the parts of a prompt from any source: types and bounds."""

import json
from typing import Any

from dora.data.limits import ID_CHARACTERS_MAX, PRIORITY_MAX
from dora.data.strict_json import check_text, read_json
from dora.errors import MISSING, InvalidValue


def checked_messages(value: Any, field: str) -> list[dict[str, Any]]:
    """Returns a list of at least one message, each an object with a ``role`` and a ``content``.

    The content is a text or a list of text parts; with tool calls, it may be null or missing. Further fields are passed
    to the template. Raises InvalidValue, naming ``field``.
    """
    if not isinstance(value, list) or not value:
        raise InvalidValue(field, value, "a list of at least one {role, content} object")
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidValue(field, message, "an object with role and content, whose role is a text")
        if "content" not in message and "tool_calls" not in message:
            raise InvalidValue(field, message, "an object with role and content, whose role is a text")
        content = message.get("content")
        if not isinstance(content, str | list) and not (content is None and "tool_calls" in message):
            raise InvalidValue(
                field, message, "an object whose content is a text, a list of parts, or null for tool calls"
            )
        for place, part in enumerate(content if isinstance(content, list) else ()):
            if not isinstance(part, str) and not is_text(part):
                kind = part.get("type", MISSING) if isinstance(part, dict) else part
                raise InvalidValue(
                    f"{field}[{number}].content[{place}].type", kind, "text: the model takes nothing else"
                )
    return value


def is_text(part: Any) -> bool:
    """Returns whether a part of a message's content is a text."""
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def check_name(name: Any, field: str) -> None:
    """Raises InvalidValue for an invalid name of a prompt or task."""
    if not isinstance(name, str) or not 1 <= len(name) <= ID_CHARACTERS_MAX:
        raise InvalidValue(field, name, f"a non-empty id of at most {ID_CHARACTERS_MAX} characters")
    check_text(name, field)
    if not name.isprintable():  # names appear on terminals and in logs
        raise InvalidValue(field, name, "a printable id, on one line")


def check_size(text: Any, field: str, bytes_most: int) -> None:
    """Raises InvalidValue for a value that is not a text, or is too long in UTF-8."""
    if not isinstance(text, str):
        raise InvalidValue(field, text, "a text")
    if len(text) > bytes_most:
        raise InvalidValue(f"{field}: characters", len(text), f"at most {bytes_most:,}")
    check_text(text, field)


def check_priority(priority: Any, field: str) -> None:
    if type(priority) is not int or not -PRIORITY_MAX <= priority <= PRIORITY_MAX:
        raise InvalidValue(field, priority, f"a whole number from {-PRIORITY_MAX} to {PRIORITY_MAX}")


def check_verifier(verifier_json: Any, place: str, kb_most: int) -> None:
    """Raises InvalidValue unless it is a JSON object, which reward functions require, of at most ``kb_most`` KiB."""
    field = f"{place}: verifier_json"
    if not isinstance(verifier_json, str):
        raise InvalidValue(field, verifier_json, "a text that contains a JSON object")
    if len(verifier_json) > kb_most << 10:
        allowed = f"at most {kb_most << 10:,} (prompts.verifier_kb = {kb_most:,})"
        raise InvalidValue(f"{field}: characters", len(verifier_json), allowed)
    verifier = {} if verifier_json == "{}" else read_json(verifier_json, field, kb_most << 10)
    if not isinstance(verifier, dict):
        raise InvalidValue(field, json.dumps(verifier)[:80], "a JSON object")
