"""Finds and ends the descendants of a process, however they hide.

A child that calls ``setsid`` leaves its group, and the child of an ended process is reparented. Linux gives it to the
nearest ancestor that is a *subreaper* (prctl(2)), so it remains a descendant of that one.
"""

import contextlib
import ctypes
import os
import signal
import sys
from typing import Final

import psutil

_SET_PDEATHSIG: Final = 1
_SET_CHILD_SUBREAPER: Final = 36


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent ends."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int) -> None:
    """Lets the system kill this process once its ``parent`` has ended, at once if it has ended already."""
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def reap(wait: bool = False) -> dict[int, int]:
    """Returns exit codes of ended children by process id, as ``subprocess`` gives them (below 0: a signal).

    With ``wait``, waits until one has ended, if there are any.
    """
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, 0 if wait and not ended else os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])
    return ended


def end_descendants() -> None:
    """Kills all descendants of this process, a subreaper, and waits for their end.

    Each is stopped first: while some are killed, no other may start new ones. A process that has just been started may
    escape one search. The kernel says whether there is another: a subreaper without children has no descendants.
    """
    reap()
    while _has_children():
        living = descendants()
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process_id in living:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process_id, number)
        reap(wait=bool(living))


def descendants(ended_too: bool = False) -> list[int]:
    """Returns ids of the processes below this one. ``ended_too`` adds those whose exit code is still to be read."""
    return [process.pid for process in psutil.Process().children(recursive=True) if ended_too or _runs(process)]


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def _prctl(option: int, value: int) -> None:
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def listener_of(port: int) -> int:
    """Returns the id of this user's process that listens at a TCP port of this machine, or 0 if none is found."""
    with contextlib.suppress(psutil.Error, OSError):
        for found in psutil.net_connections("tcp"):
            if found.status == psutil.CONN_LISTEN and found.laddr.port == port:
                return found.pid or 0
    return 0
