"""Messages that no honest sender makes: each field at a limit of its type, or as somebody would set it to do harm."""

import random
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

Kind = TypeVar("Kind", bound=Message)

_WHOLE = {
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, 2, 47, 48, 49, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_INT32: (0, 1, -1, 64, (1 << 31) - 1, -(1 << 31)),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1, 2, 3, 64, 1 << 20, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1),
    FieldDescriptor.CPPTYPE_INT64: (0, 1, -1, 1 << 40, (1 << 63) - 1, -(1 << 63)),
}
_REAL = (0.0, -0.0, 1.0, -1.0, 1e-320, 1e308, float("inf"), float("-inf"), float("nan"))
_TEXTS = ("", "w0", "../../x", "a\0b", "\n", "%s{}", "x" * 5000, "\U0001f600", "-1", "1e9", "model.safetensors", ".kv")
_BYTES = (
    b"",
    b"\0" * 4,
    b"\xff" * 4,
    b"\0" * 3,
    b"\0" * 32,
    b"\0\0\xc0\x7f",
    b"\0\0\x80\xbf",
    b"\3\0\0\0",
    bytes(4096),
)


def hostile(kind: type[Kind], chance: random.Random, known: Mapping[str, Sequence[Any]]) -> Kind:
    """A message of which every field is there or not. ``known``: values of fields, by name, that get past a check."""
    message = kind()
    fill(message, chance, known)
    return message


def fill(message: Message, chance: random.Random, known: Mapping[str, Sequence[Any]], depth: int = 0) -> None:
    fields = list(message.DESCRIPTOR.fields)
    for one_of in message.DESCRIPTOR.oneofs:  # one of each, as the last one set would be
        fields = [field for field in fields if field.containing_oneof is not one_of] + [chance.choice(one_of.fields)]
    for field in fields:
        if chance.random() < 0.25 and field.name not in known:
            continue
        times = chance.choice((0, 1, 2, 3)) if field.is_repeated else 1
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            entries = getattr(message, field.name)
            for _ in range(times):
                entries[chance.choice(_TEXTS)] = chance.choice(_REAL)
        elif field.message_type is not None:
            if depth < 3:
                for _ in range(times):
                    part = getattr(message, field.name)
                    below = part.add() if field.is_repeated else part
                    below.SetInParent()
                    fill(below, chance, known, depth + 1)
        elif field.is_repeated:
            getattr(message, field.name).extend(_value(field, chance, known) for _ in range(times))
        else:
            setattr(message, field.name, _value(field, chance, known))


def _value(field: FieldDescriptor, chance: random.Random, known: Mapping[str, Sequence[Any]]) -> Any:
    if field.name in known and chance.random() < 0.8:
        return chance.choice(known[field.name])
    if field.cpp_type in _WHOLE:
        return chance.choice(_WHOLE[field.cpp_type])
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return chance.choice(_REAL)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return chance.random() < 0.5
    return chance.choice(_BYTES if field.type == FieldDescriptor.TYPE_BYTES else _TEXTS)
