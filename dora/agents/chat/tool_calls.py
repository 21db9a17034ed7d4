"""Tool calls in a reply's text, by the formats that models write them in.

A call counts only if it is well-formed and every client can read its arguments and send them back. Anything else stays
text: the policy is trained on its tokens, and a client sees what it wrote.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dora.data import strict_json
from dora.data.strict_json import read_json
from dora.errors import InvalidValue

DEPTH_MAX: Final = strict_json.DEPTH_MAX - 16  # of a call: a request that repeats it has levels around it


@dataclass(frozen=True, slots=True)
class FoundCall:
    """A well-formed call, whose ``arguments`` are an object."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FoundCalls:
    """The calls of a text, and the text without them. The text begins as the whole one does."""

    content: str
    calls: tuple[FoundCall, ...]


Tools = Sequence[Mapping[str, Any]]  # as in the OpenAI API


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls. A call begins with one of ``marks``; with ``only_first``, only at a reply's start.

    ``find`` returns the calls of a reply's text to the tools that were offered.
    """

    name: str
    marks: tuple[str, ...]
    find: Callable[[str, Tools], FoundCalls]
    only_first: bool = False


def format_of(chat_template: str) -> ToolFormat:
    """Returns the format that a chat template shows its model; Hermes' if it shows none."""
    for name, sign in (("hermes", "<tool_call>"), ("mistral", "[TOOL_CALLS]"), ("llama", "<|python_tag|>")):
        if sign in chat_template:
            return FORMATS[name]
    return FORMATS["llama" if '"parameters":' in chat_template else "hermes"]


def _call_of(value: Any, *names: str) -> FoundCall | None:
    """Reads an object {"name": ..., <one of names>: {...}}."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments: Any = next((value[name] for name in names if name in value), {})
    if isinstance(arguments, str):
        arguments = _json(arguments)
    return FoundCall(value["name"], arguments) if isinstance(arguments, dict) else None


def _json(text: str) -> Any:
    try:
        return _portable(json.loads(text))
    except (ValueError, RecursionError, InvalidValue):
        return None


def _portable(value: Any) -> Any:
    """Returns a value that requests may hold. Raises InvalidValue for NaN, half a surrogate pair or too much depth."""
    said = json.dumps(value)
    return read_json(said, "call", len(said), DEPTH_MAX)


_TAGGED: Final = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_FUNCTION: Final = re.compile(r"<function=([^>\s]+)>(.*)</function>", re.DOTALL)
_PARAMETER: Final = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _hermes(text: str, tools: Tools) -> FoundCalls:
    """Reads ``<tool_call>`` around JSON (Hermes, Qwen 2.5 and 3), or around ``<function=...>`` (Qwen3-Coder)."""
    calls: list[FoundCall] = []

    def kept(match: re.Match[str]) -> str:
        body = match[1].strip()
        call = _call_of(_json(body), "arguments", "parameters") if body.startswith("{") else _function(body, tools)
        if call is None:
            return match[0]
        calls.append(call)
        return ""

    content = _TAGGED.sub(kept, text)
    return FoundCalls(content.rstrip() if calls else text, tuple(calls))


def _function(body: str, tools: Tools) -> FoundCall | None:
    match = _FUNCTION.fullmatch(body)
    if match is None or _PARAMETER.sub("", match[2]).strip():
        return None
    offered = (tool["function"].get("parameters") for tool in tools if tool["function"]["name"] == match[1])
    schema = next(offered, None)
    given = schema.get("properties") if isinstance(schema, dict) else None
    properties = given if isinstance(given, dict) else {}
    values = _PARAMETER.findall(match[2])
    return FoundCall(match[1], {name: _value(text, _types(properties.get(name), schema)) for name, text in values})


def _value(text: str, types: frozenset[str]) -> Any:
    """Reads a parameter of these ``types``, or of any without some: as JSON if it is one of them, else as text."""
    kind, word = _WORDS.get(text.strip(), ("", None))
    if kind in types:
        return word
    found = _json(text)
    if found is None and text.strip() != "null":
        return text
    own = _NAMES.get(type(found), {"null"})
    return text if "string" in types and (isinstance(found, str) or not own & types) else found


# As JSON and, since templates write those too, as Python has them.
_WORDS: Final[Mapping[str, tuple[str, Any]]] = {
    "true": ("boolean", True),
    "false": ("boolean", False),
    "null": ("null", None),
    "True": ("boolean", True),
    "False": ("boolean", False),
    "None": ("null", None),
}
_NAMES: Final[Mapping[type, set[str]]] = {
    str: {"string"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    list: {"array"},
    dict: {"object"},
}  # JSON schema's, by the type of a value


def _types(schema: Any, root: Any, depth: int = 0) -> frozenset[str]:
    """Returns the types that a JSON schema allows; none if it does not say. Its references begin at ``root``."""
    if not isinstance(schema, dict) or depth > DEPTH_MAX:
        return frozenset()
    said = [schema.get("type"), *_list(schema.get("type"))]
    found = {each for each in said if isinstance(each, str)}
    for value in (*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else ())):
        found |= _NAMES.get(type(value), {"null"})
    parts = [part for name in ("anyOf", "oneOf", "allOf") for part in _list(schema.get(name))]
    if isinstance(place := schema.get("$ref"), str):
        target = root
        for name in place.removeprefix("#/").split("/"):
            target = target.get(name) if isinstance(target, dict) else None
        parts.append(target)
    return frozenset(found).union(*(_types(part, root, depth + 1) for part in parts))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _llama(text: str, _: Tools) -> FoundCalls:
    """Reads a whole reply of JSON objects with ``name`` and ``parameters``, separated by ``;`` (Llama 3)."""
    body = text.strip().removeprefix("<|python_tag|>").strip()
    calls = tuple(_call_of(value, "parameters", "arguments") for value in _objects(body))
    if not calls or None in calls:
        return FoundCalls(text, ())
    return FoundCalls("", tuple(call for call in calls if call is not None))


def _objects(text: str) -> Iterator[Any]:
    decoder = json.JSONDecoder()
    while text:
        try:
            value, end = decoder.raw_decode(text)
            yield _portable(value)
        except (ValueError, RecursionError, InvalidValue):
            yield None
            return
        text = text[end:].lstrip()
        if text and not text.startswith(";"):
            yield None
            return
        text = text[1:].lstrip()


_NAMED: Final = re.compile(r"\s*([\w.-]+)\s*(?:\[ARGS\])?\s*(\{.*\})\s*", re.DOTALL)


def _mistral(text: str, _: Tools) -> FoundCalls:
    """Reads ``[TOOL_CALLS]`` before a list of objects, or before each ``name{...}``."""
    content, *bodies = text.split("[TOOL_CALLS]")
    calls: list[FoundCall | None] = []
    for body in bodies:
        value, named = _json(body.strip()), _NAMED.fullmatch(body)
        if isinstance(value, list) and value:
            calls += [_call_of(each, "arguments", "parameters") for each in value]
        else:
            calls.append(_call_of({"name": named[1], "arguments": _json(named[2])}, "arguments") if named else None)
    if not calls or None in calls:
        return FoundCalls(text, ())
    return FoundCalls(content.rstrip(), tuple(call for call in calls if call is not None))


FORMATS: Final[Mapping[str, ToolFormat]] = {
    each.name: each
    for each in (
        ToolFormat("hermes", ("<tool_call>",), _hermes),
        ToolFormat("llama", ("<|python_tag|>", "{"), _llama, only_first=True),
        ToolFormat("mistral", ("[TOOL_CALLS]",), _mistral),
    )
}
