"""Processes that a process has started, and those that they have started: found and ended, however they hide.

A child that calls ``setsid`` leaves its group, and one whose parent ends is handed on. Linux hands it to the nearest
ancestor that is a *subreaper* (prctl(2)), so that it stays a descendant of that one.
"""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Final

_SET_PDEATHSIG: Final = 1
_SET_CHILD_SUBREAPER: Final = 36
_PROC: Final = Path("/proc")


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent ends."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int) -> None:
    """Lets the system kill this process once its ``parent`` has ended; at once where it has ended already."""
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def reap(wait: bool = False) -> dict[int, int]:
    """Exit codes of the children that have ended, by process id, as ``subprocess`` gives them: below 0, a signal.

    ``wait``: until one has ended, where there are any.
    """
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, 0 if wait and not ended else os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])
    return ended


def end_descendants() -> None:
    """Kills all descendants of this process, a subreaper, and waits for their end.

    Each is stopped first: while some are killed, no other may start new ones. What escapes one look, since it was just
    being started, is found by the next.
    """
    reap()
    while living := descendants():
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process_id in living:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process_id, number)
        reap(wait=True)


def descendants(ended_too: bool = False) -> list[int]:
    """Ids of the processes below this one; ``ended_too``: with those whose exit code nobody has asked for yet."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir(_PROC) if _PROC.is_dir() else ():
        if entry.isdecimal() and (parent := _parent(entry, ended_too)) is not None:
            children.setdefault(parent, []).append(int(entry))
    found, open_ = [], [os.getpid()]
    while open_:
        below = children.get(open_.pop(), [])
        found += below
        open_ += below
    return found


def _parent(process_id: str, ended_too: bool) -> int | None:
    """Its parent's id; None for a process that is gone."""
    try:
        stat = (_PROC / process_id / "stat").read_bytes()
    except OSError:
        return None
    state, parent = stat.rpartition(b")")[2].split()[:2]  # before it stands the name, which may contain anything
    return int(parent) if ended_too or state not in (b"Z", b"X") else None


def _prctl(option: int, value: int) -> None:
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {option}")
