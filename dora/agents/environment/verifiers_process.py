"""The command of the process that runs verifiers' episodes, and its variables."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dora.errors import MISSING, InvalidValue
from dora.system.environment import SECRETS

if TYPE_CHECKING:
    from dora.config import EnvironmentConfig

PREFIX: Final = "verifiers:"
_PROGRAM: Final = Path(__file__).with_name("verifiers_bridge.py")


def bridge_argv(settings: "EnvironmentConfig", model: Path) -> list[str]:
    """Returns the command. Raises InvalidValue if there is no such interpreter."""
    python = settings.python
    if not python or not os.access(python, os.X_OK):
        allowed = "the interpreter of an environment that has verifiers 0.4, e.g. /venvs/verifiers/bin/python"
        raise InvalidValue("environment.python", python or MISSING, allowed)
    return [python, "-P", "-u", str(_PROGRAM), settings.spec.removeprefix(PREFIX), str(model), str(settings.turns)]


def bridge_variables(settings: "EnvironmentConfig", environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables: programs of its environment come first, and it has no token of DORA's."""
    own = {name: value for name, value in environment.items() if name not in SECRETS}
    folder = Path(settings.python).absolute().parent
    return {**own, "PATH": f"{folder}{os.pathsep}{environment.get('PATH', os.defpath)}"}
