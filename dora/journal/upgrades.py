"""From the facts of an older schema to those of today, one version at a time."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from dora.errors import InvalidValue
from dora.journal.frames import SCHEMA_VERSION

Values = list[Any]  # a fact as it is stored: its code, then its fields

_STANDING: Final = 18  # its code


def _from_1(values: Values) -> Values:
    """Standing says what was cancelled last, too; it did not."""
    return [*values, None, None] if values[0] == _STANDING else values


def _from_2(values: Values) -> Values:
    """Standing says where the segments before it end; it did not."""
    return [*values, []] if values[0] == _STANDING else values


# version -> what makes of its facts those of the next version
UPGRADES: Final[Mapping[int, Callable[[Values], Values]]] = {1: _from_1, 2: _from_2}


def upgraded(
    values: Values,
    schema: int,
    upgrades: Mapping[int, Callable[[Values], Values]] = UPGRADES,
    to: int = SCHEMA_VERSION,
) -> Values:
    """A fact that was stored under ``schema`` as it would be stored now. Raises InvalidValue where there is no way."""
    while schema < to:
        if schema not in upgrades:
            raise InvalidValue("log: schema version", schema, f"{to}, or one of which this DORA knows the way there")
        values = upgrades[schema](values)
        schema += 1
    return values
