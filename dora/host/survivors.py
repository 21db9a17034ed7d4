"""Processes that outlive the service that started them: recorded, found again, adopted.

A process is identified by its id, its start time (another process may get the same id) and the boot of the system. It
is not a child of the service that adopts it, so a pidfd reports its end and takes its signals, even if the id is
reused.
"""

import asyncio
import json
import logging
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from dora.errors import is_full

log = logging.getLogger("dora.service")

_PROC: Final = Path("/proc")
_BOOT_ID: Final = _PROC / "sys/kernel/random/boot_id"
_STARTED_FIELD: Final = 19  # of /proc/PID/stat, behind the name: the start time in ticks since the boot


class Adopted:
    """A living process that another process started: like ``asyncio.subprocess.Process``, with an unknown exit code.

    Raises ProcessLookupError if it has ended or did not start at ``began``.
    """

    def __init__(self, pid: int, began: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin = None
        self._descriptor = os.pidfd_open(pid)
        if began_of(pid) != began:  # read while the descriptor holds the process, so it belongs to this one
            os.close(self._descriptor)
            raise ProcessLookupError(pid)
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._descriptor, self._ends)

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):  # it has ended
                signal.pidfd_send_signal(self._descriptor, number)

    async def wait(self) -> int:
        """Returns once it has ended."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def _ends(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self.returncode = 0
        self._ended.set()


class Survivors:
    """The file of recorded processes, each with the mark from ``mark_of``: a digest of its token."""

    def __init__(self, file: Path, mark_of: Callable[[str], str]) -> None:
        self._file = file
        self._mark_of = mark_of
        self._known: dict[str, dict[str, int | str]] = {}

    def find(self, belongs: Callable[[str, list[str]], bool]) -> Mapping[str, tuple[Adopted, str]]:
        """Returns the living processes of an earlier incarnation with their marks, by name, and forgets the others.

        ``belongs(name, argv)``: whether the process of that name is started with these arguments.
        """
        found = {}
        for name, told in self._read().items():
            try:
                pid, began, mark = int(told["pid"]), int(told["began"]), str(told["mark"])
                if told["boot"] != _boot() or not belongs(name, _argv(pid)):
                    continue
                found[name] = Adopted(pid, began), mark
            except (OSError, KeyError, ValueError):  # it has ended, or the file was damaged
                continue
            self._known[name] = told
        return found

    def note(self, name: str, pid: int) -> None:
        """Records the new process of this name."""
        try:
            began = began_of(pid)
        except OSError:  # it has ended
            return
        self._known[name] = {"pid": pid, "began": began, "boot": _boot(), "mark": self._mark_of(name)}
        unfinished = self._file.with_name(f".{self._file.name}")
        try:
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                json.dump(self._known, stream)
            unfinished.replace(self._file)
        except OSError as error:  # a later life would start another one beside it, which has to wait for its end
            log.log(logging.WARNING if is_full(error) else logging.ERROR, "%s: %s", self._file, error.strerror)

    def _read(self) -> dict[str, dict[str, int | str]]:
        try:
            tree = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return tree if isinstance(tree, dict) else {}


def began_of(pid: int) -> int:
    """Returns a process's start time in ticks since the boot. Raises OSError if there is no such process."""
    stat = (_PROC / str(pid) / "stat").read_bytes()
    return int(stat.rpartition(b")")[2].split()[_STARTED_FIELD])  # the name before it may contain anything


def _argv(pid: int) -> list[str]:
    raw = (_PROC / str(pid) / "cmdline").read_bytes()
    return [part.decode(errors="replace") for part in raw.split(b"\0")[:-1]]


def _boot() -> str:
    return _BOOT_ID.read_text(encoding="ascii").strip()
