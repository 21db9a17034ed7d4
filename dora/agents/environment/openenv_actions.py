"""Converts replies to actions of OpenEnv, and observations to texts. Pure."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dora.agents.environment.protocol import Reply
from dora.data.strict_json import read_json
from dora.errors import InvalidValue

REPLY_BYTES: Final = 1 << 20  # of one that is read as JSON
_FENCED: Final = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)
_SHARED: Final = frozenset(("metadata",))  # fields of every action and observation
_CALL: Final = "call_tool"


@dataclass(frozen=True, slots=True)
class Actions:
    """The actions that an environment takes, with their ``fields``. A reply's text is given as ``text_field``, if there
    is one. If ``are_calls``, they are calls of tools.
    """

    fields: tuple[str, ...] = ()
    text_field: str = ""
    are_calls: bool = False

    def of(self, reply: Reply) -> list[dict[str, Any]]:
        """Returns the actions of a reply, one for each of its calls, or none."""
        if self.are_calls:
            return [
                {"type": _CALL, "tool_name": call.name, "arguments": call.value()}
                for call in reply.tool_calls
                if isinstance(call.value(), dict)
            ]
        found = self._object(reply.text)
        if found is not None:
            return [found]
        return [{self.text_field: reply.text.strip()}] if self.text_field else []

    def _object(self, text: str) -> dict[str, Any] | None:
        fenced = _FENCED.findall(text)
        try:
            found = read_json(fenced[0] if len(fenced) == 1 else text, "reply", REPLY_BYTES)
        except InvalidValue:
            return None
        return found if isinstance(found, dict) and found.keys() <= {*self.fields, *_SHARED} else None

    @property
    def expected(self) -> str:
        return f"Answer with a JSON object with the fields {', '.join(self.fields)}."


def actions_of(schema: Mapping[str, Any]) -> Actions:
    fields = {name: field for name, field in schema.get("properties", {}).items() if name not in _SHARED}
    kind = fields.get("type", {})
    if kind.get("const", kind.get("default")) == _CALL:
        return Actions(tuple(fields), are_calls=True)
    texts = [name for name, field in fields.items() if field.get("type") == "string" and "enum" not in field]
    required = [name for name in schema.get("required", ()) if name in fields]
    alone = next((each for each in (required, texts) if len(each) == 1), [""])[0]
    return Actions(tuple(fields), alone if alone in texts and set(required) <= {alone} else "")


def tools_of(observation: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the tools of a ``ListToolsObservation`` as in the OpenAI API."""
    return [
        {
            "type": "function",
            "function": {"name": each["name"], "description": each["description"], "parameters": each["input_schema"]},
        }
        for each in observation.get("tools", ())
    ]


def text_of(observation: Mapping[str, Any]) -> str:
    """Returns the only field of an observation if it is a text, and otherwise all of its fields as JSON."""
    fields = {name: value for name, value in observation.items() if name not in _SHARED}
    values = list(fields.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(fields, ensure_ascii=False)


def numbers_of(metadata: object) -> dict[str, float]:
    """Returns the numbers of an observation's metadata: the components of the reward."""
    found: Sequence[tuple[str, Any]] = list(metadata.items()) if isinstance(metadata, Mapping) else []
    return {name: float(value) for name, value in found if isinstance(value, int | float) and type(value) is not bool}
