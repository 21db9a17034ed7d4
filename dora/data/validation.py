"""Translates pydantic's validation errors into InvalidValue, with DORA's wording."""

from collections.abc import Iterator, Mapping
from math import isfinite
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from dora.errors import MISSING, InvalidValue, nearest, one_of

Model = TypeVar("Model", bound=BaseModel)

ALIKE: Final = 0.6  # similarity from which an unknown name is taken for a known one
BOUNDS: Final = {"ge": "of at least", "gt": "above", "le": "at most", "lt": "below"}
REACHED: Final = {"gt": 1, "lt": -1}  # added to an exclusive bound to name the nearest valid integer
WRITTEN_OUT: Final = 1e7  # floats from here on are written like 1e+07
NOT_SHOWN: Final = "(not shown)"  # in place of a secret
WHOLE: Final = "configuration"  # the field of an error without a single field


def validated_as(model: type[Model], tree: Mapping[str, Any], section: str = "") -> Model:
    """Returns a ``model`` of a nested mapping. Raises InvalidValue for the first field that is wrong.

    An unknown field is answered with the nearest name and the section's fields. ``section`` is the mapping's place.
    """
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        found = error.errors(include_url=False)
        first = next((each for each in found if each["type"] != "missing"), found[0])  # may say why a field is missing
        path = _to_field(model, tuple(str(part) for part in first["loc"]))
        value = MISSING if first["type"] == "missing" else first["input"]
        if first["type"] == "extra_forbidden":
            allowed = _known(model, path)
        else:
            allowed = _allowed(model, path, value)
        typed, value = _typed(path, value)
        if typed != path and first["type"] != "extra_forbidden":
            allowed = f"left out: {'.'.join(path)} is {allowed}"
        why = ""
        if first["type"] == "extra_forbidden" and isinstance(value, Mapping):
            value, why = MISSING, "is not a section"
        if _is_secret(typed, value, set(secret_fields(model))):
            value = NOT_SHOWN
        raise InvalidValue(".".join((section, *typed) if section else typed) or WHOLE, value, allowed, why) from error


def _typed(path: tuple[str, ...], value: Any) -> tuple[tuple[str, ...], Any]:
    """Returns dotted name and value as someone wrote them: ``windw.size`` and 3, of ``{"size": 3}`` at ``windw``."""
    while isinstance(value, Mapping) and len(value) == 1 and path:
        ((name, value),) = value.items()
        path = (*path, str(name))
    return path, value


def secret_fields(model: type[BaseModel]) -> Iterator[str]:
    """The names of all fields that hold a secret: those that are left out of ``repr``."""
    for name, field in model.model_fields.items():
        if not field.repr:
            yield name
        if (below := section_of(field)) is not None:
            yield from secret_fields(below)


def _is_secret(path: tuple[str, ...], value: Any, names: set[str]) -> bool:
    """Returns whether the value at ``path`` may hold a secret. A field may be misspelt, or be in the wrong section."""
    if value is None or isinstance(value, int | float):
        return False  # secrets are text
    if any(nearest(part, names, ALIKE) for part in path):
        return True
    if isinstance(value, Mapping):
        return any(_is_secret((str(name),), inner, names) for name, inner in value.items())
    return isinstance(value, list | tuple) and any(_is_secret((), inner, names) for inner in value)


def _to_field(model: type[BaseModel], path: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the path without the part that pydantic adds for a field of several kinds: the kind that it tried."""
    above = _section_at(model, path[:-2])
    field = above.model_fields.get(path[-2]) if above is not None and len(path) > 1 else None
    return path[:-1] if field is not None and words_of(field) else path


def _known(model: type[BaseModel], path: tuple[str, ...]) -> str:
    section, name = _section_at(model, path[:-1]), path[-1]
    fields = section.model_fields if section is not None else {}
    if nearest(name, fields, ALIKE):
        return one_of(name, fields, ALIKE)
    elsewhere = list(_everywhere(model, ""))
    names = nearest(name, [each.rpartition(".")[2] for each in elsewhere], ALIKE)
    return one_of(name, fields, ALIKE, meant=[each for each in elsewhere if each.rpartition(".")[2] in names])


def _allowed(model: type[BaseModel], path: tuple[str, ...], value: Any) -> str:
    section, given = _section_at(model, path), path
    while section is None and len(path) > 1 and _section_at(model, path[:-1]) is None:
        path = path[:-1]  # an element of a list of plain values: the list is what is described
    above = _section_at(model, path[:-1])
    field = above.model_fields.get(path[-1]) if above is not None and path else None
    if section is not None:
        kind = "a list of sections" if field is not None and _is_list(field) else "a section"
        return f"{kind} with {', '.join(section.model_fields)}"
    assert field is not None, path  # pydantic names no field that there is not
    kind = kind_of(field)
    if get_origin(kind) is tuple:
        return f"a list of {field.description}"
    if get_origin(kind) is Literal:
        choices = [str(choice) for choice in get_args(kind)]
        return one_of(str(value), choices, ALIKE)
    if kind in (int, float):
        return _number(field, finite=not isinstance(value, float) or isfinite(value))
    if get_origin(kind) is dict and path == given:
        return "a table"
    if get_origin(kind) is dict:
        return "a finite number" if get_args(kind)[1] is float else "a text, in quotes"
    return "true or false" if kind is bool else _text(field, value)


def _number(field: FieldInfo, finite: bool) -> str:
    whole = kind_of(field) is int
    bounds = {name: getattr(each, name) for each in limits_of(field) for name in BOUNDS if hasattr(each, name)}
    if whole:  # any bound of whole numbers can be told as one that may be reached
        bounds = {
            {"gt": "ge", "lt": "le"}.get(name, name): value + REACHED.get(name, 0) for name, value in bounds.items()
        }
    kind = "a whole number" if whole else "a number" if finite else "a finite number"
    if bounds.keys() == {"ge", "le"}:
        or_words = "".join(f" or {word}" for word in words_of(field))
        return f"{kind} from {_digits(bounds['ge'])} to {_digits(bounds['le'])}{or_words}"
    said = [f"{words} {_digits(bounds[name])}" for name, words in BOUNDS.items() if name in bounds]
    return f"{kind} {' and '.join(said)}" if said else kind


def words_of(field: FieldInfo) -> tuple[str, ...]:
    kinds = get_args(field.annotation) if get_origin(field.annotation) in (Union, UnionType) else ()
    return tuple(word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind))


def _digits(value: float) -> str:
    """Writes a bound as a person would: ``0.0`` as ``0``."""
    if isinstance(value, float) and value >= WRITTEN_OUT:
        return f"{value:g}"
    return str(int(value)) if value == int(value) else str(value)


def _text(field: FieldInfo, value: Any) -> str:
    if not isinstance(value, str):
        return "a text, in quotes"
    if any(getattr(each, "pattern", None) for each in field.metadata) and field.description:
        return field.description
    return "a non-empty text" if not value else "a text in UTF-8"


def _section_at(model: type[BaseModel], path: tuple[str, ...]) -> type[BaseModel] | None:
    section, field = model, None
    for part in path:
        if field is not None and part.isdecimal() and _is_list(field):
            field = None
            continue
        field = section.model_fields.get(part)
        below = section_of(field)
        if below is None:
            return None
        section = below
    return section


def section_of(field: FieldInfo | None) -> type[BaseModel] | None:
    """Returns the section of a field, also an optional one; for a list of sections, their type."""
    if field is None:
        return None
    kind = get_args(kind_of(field))[0] if _is_list(field) else kind_of(field)
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _is_list(field: FieldInfo) -> bool:
    return get_origin(kind_of(field)) is tuple


def kind_of(field: FieldInfo) -> Any:
    """The type of a field's values, optional or not, without its limits."""
    kind = _present(field.annotation)
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def limits_of(field: FieldInfo) -> Iterator[Any]:
    """The limits of a field's values, optional or not."""
    kind = _present(field.annotation)
    yield from field.metadata
    yield from get_args(kind)[1:] if get_origin(kind) is Annotated else ()


def _present(kind: Any) -> Any:
    if get_origin(kind) not in (Union, UnionType):
        return kind
    kinds = [each for each in get_args(kind) if each is not NoneType and get_origin(each) is not Literal]
    return kinds[0] if len(kinds) == 1 else kind


def _everywhere(model: type[BaseModel], path: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"{path}{name}"
        below = section_of(field)
        if below is not None:
            yield from _everywhere(below, f"{path}{name}.")
