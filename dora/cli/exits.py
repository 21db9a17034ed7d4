"""Exit codes, and how an expected failure ends a command: one line on stderr, never a traceback."""

import sys
from enum import IntEnum
from typing import Any

import typer
from typer.core import TyperGroup

from dora.errors import Conflict, DoraError, InvalidValue, NotFound


class ExitCode(IntEnum):
    """What a command's exit code means. ``INTERRUPTED`` is the shell's own convention for Ctrl-C."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    REFUSED = 4
    UNAUTHENTICATED = 5
    INTERRUPTED = 130


MEANINGS = {
    ExitCode.OK: "done",
    ExitCode.FAILED: "a check failed (verify, the demo's bars), or the service failed",
    ExitCode.USAGE: "bad usage or a bad value",
    ExitCode.UNREACHABLE: "the service cannot be reached",
    ExitCode.REFUSED: "the service refused: not found, or not possible now",
    ExitCode.UNAUTHENTICATED: "no token, or a wrong one",
    ExitCode.INTERRUPTED: "interrupted (Ctrl-C)",
}


class DoraGroup(TyperGroup):
    """The root command: every DoraError of a command becomes one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except DoraError as error:
            sys.stderr.write(f"dora: {' '.join(str(error).split())}\n")
            raise typer.Exit(exit_code_of(error)) from error
        except KeyboardInterrupt:
            sys.stderr.write("dora: interrupted\n")
            raise typer.Exit(ExitCode.INTERRUPTED) from None


def exit_code_of(error: DoraError) -> ExitCode:
    """The exit code that an expected failure ends its command with."""
    from dora.rpc.errors import LimitExceeded, ServiceUnavailable, Unauthenticated

    table: tuple[tuple[type[DoraError], ExitCode], ...] = (
        (ServiceUnavailable, ExitCode.UNREACHABLE),
        (Unauthenticated, ExitCode.UNAUTHENTICATED),
        (LimitExceeded, ExitCode.REFUSED),
        (Conflict, ExitCode.REFUSED),
        (NotFound, ExitCode.REFUSED),
        (InvalidValue, ExitCode.USAGE),  # the others are its subclasses and stand before it
    )
    return next((code for kind, code in table if isinstance(error, kind)), ExitCode.FAILED)
