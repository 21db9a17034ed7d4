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
_TEXTS = ("", "w9", "../../x", "a\0b", "\n", "%s{}", "x" * 5000, "\U0001f600", "-1", "1e9", "model.safetensors", ".kv")
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
            entries, kinds = getattr(message, field.name), field.message_type.fields_by_name
            for _ in range(times):
                entries[_value(kinds["key"], chance, {})] = _value(kinds["value"], chance, {})
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
    if field.enum_type is not None:
        return chance.choice([*field.enum_type.values_by_number, 99])  # proto3 keeps numbers without a name
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return chance.random() < 0.5
    return chance.choice(_BYTES if field.type == FieldDescriptor.TYPE_BYTES else _TEXTS)


def mangled(content: bytes, chance: random.Random) -> bytes:
    """``content`` with bits turned, cut, doubled or mixed up; or bytes that were never a message."""
    kind = chance.randrange(7)
    if kind == 0 or not content:
        return chance.randbytes(chance.choice((1, 2, 7, 64, 1000)))
    broken = bytearray(content)
    place = chance.randrange(len(broken))
    if kind == 1:
        for _ in range(chance.randint(1, 4)):
            broken[chance.randrange(len(broken))] ^= 1 << chance.randrange(8)
    elif kind == 2:
        del broken[place:]
    elif kind == 3:  # a field's number and wire type
        broken[0] = chance.randrange(256)
    elif kind == 4:  # a length or number as long as the format allows, and longer
        broken[place:place] = b"\xff" * chance.randint(1, 11)
    elif kind == 5:
        broken += content[place:] * chance.randint(1, 3)
    else:  # groups, which open and never close, nested
        broken = bytearray(b"\x0b" * chance.choice((1, 50, 5000))) + broken
    return bytes(broken)


def generated(
    kind: type[Kind], chance: random.Random, known: Mapping[str, Sequence[Any]], honesty: float = 0.0
) -> bytes:
    """The bytes of a message as somebody may send it: as it should be, with hostile fields, very large, or mangled.

    ``honesty``: the share of messages that are only of the first kind.
    """
    share = 0.5 if chance.random() < honesty else chance.random()
    if share < 0.3:
        return hostile(kind, chance, known).SerializeToString()
    message = kind()
    _plausible(message, chance, known)
    if share < 0.33:
        _inflate(message, chance)
    content = message.SerializeToString()
    return content if share < 0.6 else mangled(content, chance)


def _plausible(message: Message, chance: random.Random, known: Mapping[str, Sequence[Any]]) -> None:
    """Fills in what is known, and little else. ``known`` may have a oneof's name too, with those of its fields."""
    for field in message.DESCRIPTOR.fields:
        one_of = field.containing_oneof
        if one_of is not None and len(one_of.fields) > 1:
            continue
        if field.has_presence and chance.random() < 0.7:
            continue
        if field.name in known and field.message_type is None:
            value = chance.choice(known[field.name])
            if field.is_repeated:
                getattr(message, field.name).append(value)
            else:
                setattr(message, field.name, value)
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            part = getattr(message, field.name)
            _plausible(part.add() if field.is_repeated else part, chance, known)
    for one_of in (each for each in message.DESCRIPTOR.oneofs if len(each.fields) > 1):
        part = getattr(message, chance.choice(known[one_of.name]))
        part.SetInParent()
        _plausible(part, chance, known)


def _inflate(message: Message, chance: random.Random) -> None:
    """One of its fields becomes very large."""
    field = chance.choice(message.DESCRIPTOR.fields or [None])
    many = chance.choice((1000, 100_000, 1_000_000))
    if field is None:
        return
    if field.message_type is not None:
        if field.message_type.GetOptions().map_entry:
            entries, kinds = getattr(message, field.name), field.message_type.fields_by_name
            is_text = kinds["key"].type == FieldDescriptor.TYPE_STRING
            for number in range(many // 100):
                entries[f"m{number}" if is_text else number] = kinds["value"].default_value
        elif field.is_repeated:
            for _ in range(many // 100):
                getattr(message, field.name).add()
        else:
            _inflate(getattr(message, field.name), chance)
    elif field.type == FieldDescriptor.TYPE_STRING:
        _set(message, field, chance.choice(("x", "[", "9", "\u00fc", '{"a":')) * many)
    elif field.type == FieldDescriptor.TYPE_BYTES:
        _set(message, field, b"\3\0\0\0" * (many // 4))


def _set(message: Message, field: FieldDescriptor, value: Any) -> None:
    if field.is_repeated:
        getattr(message, field.name).append(value)
    else:
        setattr(message, field.name, value)
