"""Messages of a chat as clients send them, as templates read them, and their equality.

Source: the OpenAI API reference, "Create chat completion"; transformers' documentation, "Tool use".
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dora.errors import InvalidValue
from dora.prompts.check import checked_messages

Message = Mapping[str, Any]
ROLES: Final = ("system", "developer", "user", "assistant", "tool")
# Fields of a message that clients add, drop or rename when they repeat it. Its meaning is in the others.
_UNSTABLE: Final = frozenset(
    (
        *("reasoning", "reasoning_content", "thinking", "refusal", "annotations", "audio", "function_call", "id"),
        *("provider_specific_fields", "tool_call_id", "status", "parsed"),
    )
)


def checked_chat(value: Any, field: str = "messages") -> list[dict[str, Any]]:
    """Returns the messages of a request that asks for an answer. Raises InvalidValue, naming ``field``.

    The last message must not be the assistant's: nothing that it did not sample is attributed to the policy.
    """
    messages = checked_messages(value, field)
    for number, message in enumerate(messages):
        role = message["role"]
        if role not in ROLES:
            raise InvalidValue(f"{field}[{number}].role", role, f"one of {', '.join(ROLES)}")
        calls = message.get("tool_calls")
        if calls is not None:
            _check_calls(calls, f"{field}[{number}].tool_calls")
    if messages[-1]["role"] == "assistant":
        allowed = "a message of another role: an answer cannot be prefilled"
        raise InvalidValue(f"{field}[{len(messages) - 1}].role", "assistant", allowed)
    return messages


def checked_tools(value: Any, field: str = "tools") -> list[dict[str, Any]]:
    """Returns the tools of a request. Raises InvalidValue unless each is a function with a name."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise InvalidValue(field, value, "a list of tools")
    for number, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            allowed = 'an object {"type": "function", "function": {"name": ..., "parameters": ...}}'
            raise InvalidValue(f"{field}[{number}]", tool, allowed)
    return value


def _check_calls(calls: Any, field: str) -> None:
    if not isinstance(calls, list):
        raise InvalidValue(field, calls, "a list of tool calls")
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidValue(f"{field}[{number}]", call, 'an object {"function": {"name": ..., "arguments": ...}}')


def text_of(content: str | list[Any] | None) -> str:
    """Returns the content of a message, which was checked, as one text."""
    if isinstance(content, list):
        return "".join(part if isinstance(part, str) else part["text"] for part in content)
    return content or ""


def arguments_of(call: Mapping[str, Any]) -> Any:
    """Returns the arguments of a tool call as a value, if they are JSON, or else as their text."""
    arguments = call["function"].get("arguments")
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        return json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments


def key_of(message: Message) -> str:
    """Returns a text that is equal for messages that a client means as the same one.

    Clients repeat an answer without its reasoning, with other spaces around it, with its arguments serialised in
    another way, or with other ids of its calls. The contents of other messages are compared exactly.
    """
    parts: dict[str, Any] = {
        name: value for name, value in message.items() if value is not None and name not in _UNSTABLE
    }
    content = text_of(message.get("content"))
    is_answer = message["role"] == "assistant"
    parts["content"] = content.strip() if is_answer else content
    calls = parts.pop("tool_calls", None)
    if calls:
        parts["tool_calls"] = [[call["function"]["name"], arguments_of(call)] for call in calls]
    if is_answer:
        parts = {name: parts[name] for name in ("role", "content", "tool_calls") if name in parts}
    return json.dumps(parts, sort_keys=True, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Form:
    """The form that a template expects of a message with tool calls. Templates differ, and none says so."""

    arguments_as_text: bool = False  # it writes the arguments as they are; otherwise it serialises an object
    none_as_content: bool = False  # it writes the calls only if the content is None


FORMS: Final = tuple(Form(text, none) for none in (False, True) for text in (False, True))


def for_template(message: Message, form: Form) -> dict[str, Any]:
    """Returns a message as chat templates read it: texts as texts, arguments as ``form`` says."""
    found = {name: value for name, value in message.items() if value is not None}
    reasoning = found.get("reasoning", found.get("reasoning_content"))
    if reasoning is not None:
        found["reasoning"] = found["reasoning_content"] = reasoning
    calls = found.pop("tool_calls", None)
    content = text_of(message.get("content"))
    if calls:
        found["tool_calls"] = [_call_for_template(call, form) for call in calls]
    found["content"] = None if calls and form.none_as_content and not content else content
    return found


def _call_for_template(call: Mapping[str, Any], form: Form) -> dict[str, Any]:
    value: Any = arguments_of(call)
    if form.arguments_as_text and not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False)
    return {"type": "function", **call, "function": {**call["function"], "arguments": value}}


def context_key(tools: Sequence[Mapping[str, Any]] | None, options: Mapping[str, Any] | None) -> str:
    """Returns a text that is equal for requests whose tools and template options are."""
    return json.dumps([list(tools or ()), dict(options or {})], sort_keys=True, ensure_ascii=False)
