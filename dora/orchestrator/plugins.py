"""Registers strategies of installed packages by their entry points, in every process that runs the core.

A package names its strategies in pyproject.toml. Once it is installed, ``dora serve``, ``dora simulate``, the sweep and
``dora replay`` know them by name:

    [project.entry-points."dora.policies"]
    mine = "my_package.mine:MinePolicy"     # a Policy class, or a dora.core.policies.Strategy
"""

from functools import cache
from importlib.metadata import entry_points
from typing import Final

from dora.core.policies import register
from dora.errors import InvalidValue, described

GROUP: Final = "dora.policies"


@cache
def load_strategies() -> None:
    """Registers the strategies of installed packages, once a process.

    Raises InvalidValue with package and entry point if one cannot be imported or is no strategy, Conflict for a name
    that is taken.
    """
    for point in entry_points(group=GROUP):
        field = f"{GROUP}: {point.name}, of {point.dist.name if point.dist is not None else 'an unknown package'}"
        try:
            strategy = point.load()
        except Exception as error:  # third-party modules may raise anything
            raise InvalidValue(field, point.value, f"an importable entry point ({described(error)})") from error
        try:
            register(point.name, strategy)
        except InvalidValue as error:
            raise type(error)(field, point.value, error.allowed) from error
