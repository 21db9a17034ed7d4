"""Finds an environment's class by name, and checks it before any session begins."""

import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from dora.environment.protocol import Environment
from dora.errors import DoraError, InvalidValue, described

OPTION: Final = "--environment"
LOADS_S: Final = 120
METHODS: Final = ("reset", "step")
_OTHER_KINDS: Final = {
    "gymnasium": "module:Class: wrap it in a class whose step() returns its five-tuple (docs/environments.md)",
    "reasoning-gym": "module:Class: give reasoning-gym:TASK to --prompts, whose tasks have one turn",
    "verifiers": "module:Class: verifiers reach a service by `dora front`",
    "openenv": "module:Class: wrap its client in a class",
}


def load_environment(spec: str) -> Callable[[], Environment]:
    """Returns the class ``module:Class``. Raises InvalidValue unless it can be imported and has the methods."""
    module_name, _, name = spec.partition(":")
    if module_name in _OTHER_KINDS:
        raise InvalidValue(OPTION, spec, _OTHER_KINDS[module_name])
    if not name:
        raise InvalidValue(OPTION, spec, "module:Class")
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


def check_loads(spec: str, environment: Mapping[str, str]) -> None:
    """Loads the class in a process of its own: a service runs no code of others. Raises InvalidValue as it does."""
    argv = [sys.executable, "-m", __name__, spec]
    try:
        done = subprocess.run(argv, env=dict(environment), capture_output=True, timeout=LOADS_S, check=False)
    except subprocess.TimeoutExpired:
        raise InvalidValue(OPTION, spec, f"the class of a module that is imported within {LOADS_S} s") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        raise InvalidValue(OPTION, spec, said[-1])


def one_line(error: BaseException) -> str:
    """Returns an error of user code in one printable line."""
    said = str(error) if isinstance(error, DoraError) else described(error)
    return " ".join("".join(each if each.isprintable() else " " for each in said).split())


if __name__ == "__main__":
    try:
        load_environment(sys.argv[1])
    except InvalidValue as refused:
        sys.exit(refused.allowed)
