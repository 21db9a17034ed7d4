"""Finds an environment's class or adapter by name, and checks it before any session begins.

A package adds an adapter, which ``--environment NAME:REST`` uses, by an entry point:

[project.entry-points."dora.environments"]
mine = "my_package.mine:episodes"    # called with NAME:REST; returns what makes a session's environment (``protocol``)
"""

import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from dora.agents.environment.gymnasium_text import gymnasium_episodes
from dora.agents.environment.protocol import Environment
from dora.agents.environment.spec import OPTION, one_line
from dora.agents.environment.verifiers_process import bridge_argv, bridge_variables
from dora.errors import InvalidValue

if TYPE_CHECKING:
    from dora.config import EnvironmentConfig

GROUP: Final = "dora.environments"
LOADS_S: Final = 120
METHODS: Final = ("reset", "step")
Adapter = Callable[[str], Callable[[], Environment]]


def _one_turn(spec: str) -> Callable[[], Environment]:
    raise InvalidValue(OPTION, spec, "module:Class: give reasoning-gym:TASK to --prompts, whose tasks have one turn")


def _openenv(spec: str) -> Callable[[], Environment]:
    from dora.agents.environment.openenv import openenv_episodes  # its HTTP client takes long to import

    return openenv_episodes(spec)


ADAPTERS: Final[dict[str, Adapter | None]] = {  # None: its episodes run by another interpreter (verifiers_process)
    "gymnasium": gymnasium_episodes,
    "openenv": _openenv,
    "reasoning-gym": _one_turn,
    "verifiers": None,
}


def load_environment(spec: str) -> Callable[[], Environment] | None:
    """Returns the maker of environments: the class ``module:Class``, or an adapter's, as of ``gymnasium:ID``.

    Returns None if another interpreter runs the episodes. Raises InvalidValue unless it can be imported and has the
    methods.
    """
    kind, _, name = spec.partition(":")
    if not name:
        raise InvalidValue(OPTION, spec, "module:Class")
    points = {point.name: point for point in entry_points(group=GROUP)}
    try:
        if kind in ADAPTERS or kind in points:
            adapter = ADAPTERS[kind] if kind in ADAPTERS else points[kind].load()
            return adapter and adapter(spec)
        module = importlib.import_module(kind)
    except InvalidValue:
        raise
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        known = (*ADAPTERS, *points)
        allowed = "what its adapter takes" if kind in known else "the class of a module that can be imported"
        raise InvalidValue(OPTION, spec, f"{allowed} ({one_line(error)}); adapters: {', '.join(known)}") from error
    found: Any = getattr(module, name, None)
    if not callable(found):
        raise InvalidValue(OPTION, spec, f"a class of {kind}, which has no {name} that can be called")
    for method in METHODS if inspect.isclass(found) else ():
        if not inspect.iscoroutinefunction(getattr(found, method, None)):
            raise InvalidValue(OPTION, spec, f"a class with `async def {method}(self, ...)`")
    return cast(Callable[[], Environment], found)


def runs_elsewhere(spec: str) -> bool:
    """Returns whether another interpreter runs the episodes."""
    return ADAPTERS.get(spec.partition(":")[0], spec) is None


def check_loads(settings: "EnvironmentConfig", environment: Mapping[str, str]) -> None:
    """Loads the environment in a process of its own: a service runs no code of others. Raises InvalidValue."""
    spec, argv, variables = settings.spec, [sys.executable, "-m", __name__, settings.spec], dict(environment)
    if runs_elsewhere(spec):
        argv, variables = bridge_argv(settings, Path()), bridge_variables(settings, environment)
    try:
        done = subprocess.run(argv, env=variables, capture_output=True, timeout=LOADS_S, check=False)
    except subprocess.TimeoutExpired:
        raise InvalidValue(OPTION, spec, f"the class of a module that is imported within {LOADS_S} s") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        raise InvalidValue(OPTION, spec, said[-1])


if __name__ == "__main__":
    try:
        load_environment(sys.argv[1])
    except InvalidValue as refused:
        sys.exit(refused.allowed)
