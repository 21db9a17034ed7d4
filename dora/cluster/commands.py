"""Runs a scheduler's commands."""

import subprocess
from typing import Final

from dora.errors import InvalidValue
from dora.system.environment import without_secrets

CALL_S: Final = 60.0  # a call may take


def called(command: str, *arguments: str, setting: str, which: str, answers: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, whatever its exit code. It gets no secrets, as a job may get its caller's environment.

    ``which`` says which command it must be, and ``answers`` who answers it. Raises InvalidValue for ``setting`` if the
    command is not there, or takes longer than ``CALL_S``.
    """
    try:
        return subprocess.run(
            [command, *arguments],
            env=without_secrets(),
            capture_output=True,
            text=True,
            timeout=CALL_S,
            check=False,
        )
    except FileNotFoundError as error:
        raise InvalidValue(setting, command, f"a command on the PATH of this machine, {which}") from error
    except subprocess.TimeoutExpired as error:
        raise InvalidValue(setting, command, f"an answer of {answers} within {CALL_S:.0f} s") from error
