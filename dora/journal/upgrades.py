"""Upgrades records of older schemas, one version at a time."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from dora.errors import InvalidValue
from dora.journal.frames import SCHEMA_VERSION

Values = list[Any]  # a fact as it is stored: its code, then its fields

_STANDING: Final = 18  # codes
_TOKENS: Final = 6
_VERDICT: Final = 7


def _from_1(values: Values) -> Values:
    """Adds the latest cancelled groups to Standing."""
    return [*values, None, None] if values[0] == _STANDING else values


def _from_2(values: Values) -> Values:
    """Adds the ends of earlier segments to Standing."""
    return [*values, []] if values[0] == _STANDING else values


def _from_3(values: Values) -> Values:
    """Adds turns of sessions to Tokens."""
    return [*values, [], b""] if values[0] == _TOKENS else values


def _from_4(values: Values) -> Values:
    """Adds rewards of single turns to Verdict. Prompts of older DORAs have no least group size
    (``records.prompt_of``).
    """
    return [*values, {}] if values[0] == _VERDICT else values


def _from_5(values: Values) -> Values:
    """Changes nothing: turns in Tokens may have sampling of their own."""
    return values


def _from_6(values: Values) -> Values:
    """Adds prompt logprobs to Tokens."""
    return [*values, []] if values[0] == _TOKENS else values


# version -> function that converts its records to the next version
UPGRADES: Final[Mapping[int, Callable[[Values], Values]]] = {
    1: _from_1,
    2: _from_2,
    3: _from_3,
    4: _from_4,
    5: _from_5,
    6: _from_6,
}


def upgraded(
    values: Values,
    schema: int,
    upgrades: Mapping[int, Callable[[Values], Values]] = UPGRADES,
    to: int = SCHEMA_VERSION,
) -> Values:
    """Upgrades a record stored under ``schema``. Raises InvalidValue if there is no upgrade."""
    while schema < to:
        if schema not in upgrades:
            raise InvalidValue("log: schema version", schema, f"{to}, or one of which this DORA knows the way there")
        values = upgrades[schema](values)
        schema += 1
    return values
