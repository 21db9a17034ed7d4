"""Finds an environment's class by name, and checks it before any session begins."""

import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, cast

from dora.agents.environment.gymnasium_text import gymnasium_episodes
from dora.agents.environment.openenv import openenv_episodes
from dora.agents.environment.protocol import Environment
from dora.agents.environment.spec import OPTION, one_line
from dora.agents.environment.verifiers_process import PREFIX, bridge_argv, bridge_variables
from dora.config import EnvironmentConfig
from dora.errors import InvalidValue

LOADS_S: Final = 120
METHODS: Final = ("reset", "step")
_OTHER_KINDS: Final = {
    "reasoning-gym": "module:Class: give reasoning-gym:TASK to --prompts, whose tasks have one turn",
}
_PACKAGES: Final[dict[str, Callable[[str], Callable[[], Environment]]]] = {
    "gymnasium": gymnasium_episodes,
    "openenv": openenv_episodes,
}


def load_environment(spec: str) -> Callable[[], Environment]:
    """Returns the class ``module:Class``, or what makes sessions' environments of another kind, as ``gymnasium:ID``.

    Raises InvalidValue unless it can be imported and has the methods.
    """
    module_name, _, name = spec.partition(":")
    if module_name in _OTHER_KINDS:
        raise InvalidValue(OPTION, spec, _OTHER_KINDS[module_name])
    if not name:
        raise InvalidValue(OPTION, spec, "module:Class")
    if module_name in _PACKAGES:
        return _PACKAGES[module_name](spec)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        allowed = f"the class of a module that can be imported ({one_line(error)})"
        raise InvalidValue(OPTION, spec, allowed) from error
    found: Any = getattr(module, name, None)
    if not callable(found):
        raise InvalidValue(OPTION, spec, f"a class of {module_name}, which has no {name} that can be called")
    for method in METHODS if inspect.isclass(found) else ():
        if not inspect.iscoroutinefunction(getattr(found, method, None)):
            raise InvalidValue(OPTION, spec, f"a class with `async def {method}(self, ...)`")
    return cast(Callable[[], Environment], found)


def check_loads(settings: EnvironmentConfig, environment: Mapping[str, str]) -> None:
    """Loads the environment in a process of its own: a service runs no code of others. Raises InvalidValue."""
    spec, argv, variables = settings.spec, [sys.executable, "-m", __name__, settings.spec], dict(environment)
    if spec.startswith(PREFIX):
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
