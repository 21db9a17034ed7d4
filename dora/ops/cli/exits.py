"""Exit codes. An expected failure ends a command with one line on stderr, never with a traceback."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from textwrap import fill
from typing import Any, TextIO, cast

import typer
from typer.core import TyperGroup

from dora.errors import Conflict, DoraError, InvalidValue, NotFound


class ExitCode(IntEnum):
    """Exit codes of commands. The last two are the shell's conventions for Ctrl-C and SIGPIPE."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    REFUSED = 4
    UNAUTHENTICATED = 5
    NO_ANSWER = 6
    INTERRUPTED = 130
    UNREAD = 141


MEANINGS = {
    ExitCode.OK: "done",
    ExitCode.FAILED: "a check failed (verify, the demo's limits), the service failed, or the output cannot be written",
    ExitCode.USAGE: "bad usage or an invalid value",
    ExitCode.UNREACHABLE: "the service cannot be reached",
    ExitCode.REFUSED: "the service refused the call: something was not found, or the state does not allow it",
    ExitCode.UNAUTHENTICATED: "the token is missing, wrong, or of another role",
    ExitCode.NO_ANSWER: "the service accepts connections, but did not answer in time",
    ExitCode.INTERRUPTED: "interrupted (Ctrl-C)",
    ExitCode.UNREAD: "the reader of the output has closed it",
}


# Commands that call a service. In the others, a wrong value can only come from the user.
ASKING = frozenset(
    {
        "status",
        "versions",
        "workers",
        "pools",
        "trajectories",
        "cancel",
        "migrate",
        "drain",
        "rebalance",
        "watch",
    }
    | {"checkpoint", "eval", "hosts", "scale"}
)


class OutputFailed(Exception):
    """Standard output cannot be written. The cause is the OSError."""


class CheckedOutput:
    """Standard output whose write errors raise OutputFailed, which tells them from OSErrors of other files."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            raise OutputFailed from error

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            raise OutputFailed from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def open_closed() -> None:
    """Opens each closed standard stream on the null device.

    Otherwise the next opened file would get its descriptor, and would receive text meant for the stream. ``sys.stdout``
    stays None, so that a command can report it.
    """
    for descriptor, mode in ((0, "r"), (1, "w"), (2, "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            os.set_inheritable(descriptor, True)
            if descriptor == 1:
                continue
            stream = os.fdopen(descriptor, mode, encoding="utf-8", closefd=False)
            setattr(sys, "stderr" if descriptor else "stdin", stream)


@contextmanager
def checked_output() -> Iterator[None]:
    """Ends the command if output printed in this block cannot be written.

    A full disk gives one line on stderr. A closed pipe ends the command silently, like SIGPIPE.
    """
    stream = sys.stdout
    if stream is None:  # closed by the parent process
        sys.stderr.write("dora: standard output is closed\n")
        raise SystemExit(ExitCode.FAILED)
    sys.stdout = cast(TextIO, CheckedOutput(stream))
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OutputFailed as failed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # otherwise Python would flush again at exit
        if isinstance(failed.__cause__, BrokenPipeError):
            raise SystemExit(ExitCode.UNREAD) from failed
        sys.stderr.write(f"dora: standard output cannot be written: {failed.__cause__}\n")
        raise SystemExit(ExitCode.FAILED) from failed
    finally:
        sys.stdout = stream


def say(text: str) -> None:
    """Prints one indented line to stderr; a terminal wraps it at words."""
    line = text[: len(text) - len(text.lstrip(" "))] + " ".join(text.split())
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        line = fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    with suppress(OSError):  # stderr carries no results, so a service continues if it cannot be written
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


class DoraGroup(TyperGroup):
    """The root command. Turns every DoraError and every failure of stdout into one line and an exit code."""

    def main(self, *arguments: Any, **options: Any) -> Any:
        open_closed()
        with checked_output():
            return super().main(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except DoraError as error:
            say(f"dora: {error}")
            raise typer.Exit(exit_code_of(error, calls_service=ctx.invoked_subcommand in ASKING)) from error
        except KeyboardInterrupt:
            sys.stderr.write("dora: interrupted\n")
            raise typer.Exit(ExitCode.INTERRUPTED) from None


def exit_code_of(error: DoraError, calls_service: bool = True) -> ExitCode:
    """Returns the exit code for an expected failure. If the command ``calls_service``, that may have refused."""
    from dora.rpc.errors import LimitExceeded, NoAnswer, PermissionDenied, ServiceUnavailable, Unauthenticated

    table: tuple[tuple[type[DoraError], ExitCode], ...] = (
        (NoAnswer, ExitCode.NO_ANSWER),
        (ServiceUnavailable, ExitCode.UNREACHABLE),
        (Unauthenticated, ExitCode.UNAUTHENTICATED),
        (PermissionDenied, ExitCode.UNAUTHENTICATED),
        (LimitExceeded, ExitCode.REFUSED),
        (Conflict, ExitCode.REFUSED),
        (NotFound, ExitCode.REFUSED),
        (InvalidValue, ExitCode.USAGE),  # subclasses before their base
    )
    code = next((code for kind, code in table if isinstance(error, kind)), ExitCode.FAILED)
    return ExitCode.USAGE if code is ExitCode.REFUSED and not calls_service else code
