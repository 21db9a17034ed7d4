"""Handles the signals of a service, a host, and the processes that they start. docs/operations.md has the table."""

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Final

# End of a terminal, Ctrl-C, a scheduler's notice (Slurm sends SIGUSR1 where it is asked to), a stop.
DRAIN: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
IGNORED: Final = (signal.SIGUSR2, signal.SIGPIPE)
# A worker or pool: its service drains, then tells it to end. A scheduler sends a notice to every process.
CHILD_STOP: Final = (signal.SIGTERM, signal.SIGINT)
CHILD_IGNORED: Final = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE)
INTERRUPTED: Final = 130


def drain_on_signals(drain: Callable[[], None], end: Callable[[], object]) -> None:
    """Calls ``drain`` at the first signal of ``DRAIN``, and ``end`` at a SIGINT that follows one.

    A SIGINT after ``end`` ends the process at once. Further signals of other kinds change nothing. SIGHUP stays ignored
    if it was at the start (nohup).
    """
    loop = asyncio.get_running_loop()
    phase = 0

    def arrived(number: signal.Signals) -> None:
        nonlocal phase
        if phase and number != signal.SIGINT:
            return
        phase += 1
        if phase == 1:
            drain()
        elif phase == 2:
            end()
        else:
            os._exit(INTERRUPTED)

    for number in DRAIN:
        if not (number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN):
            loop.add_signal_handler(number, arrived, number)
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)


def ignore_notices() -> None:
    """Ignores what a terminal or scheduler sends to all processes. Call it first: an engine loads for a minute."""
    for number in CHILD_IGNORED:
        signal.signal(number, signal.SIG_IGN)


def stop_on_signals(stop: Callable[[], None]) -> None:
    """Calls ``stop`` at the signals that end a worker or pool."""
    for number in CHILD_STOP:
        signal.signal(number, lambda *_: stop())
