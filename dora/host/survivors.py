"""Processes that outlive the service that started them: recorded, found again, adopted.

A process is identified by its id, its start time (another process may get the same id) and the boot of the system. It
is not a child of the service that adopts it, so a pidfd reports its end and takes its signals, even if the id is
reused.
"""

import asyncio
import json
import logging
import os
import re
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, get_type_hints

from dora.errors import is_full

log = logging.getLogger("dora.service")

_PROC: Final = Path("/proc")
_BOOT_ID: Final = _PROC / "sys/kernel/random/boot_id"
_PID_MAX: Final = 1 << 22  # Linux gives no higher one
_MARK: Final = re.compile(r"(?:[0-9a-f]{2})*")
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
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def _ends(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self.returncode = 0
        self._ended.set()


@dataclass(frozen=True, slots=True)
class _Known:
    """A process as the file has it. It was recorded in the state folder at ``place``, and served the service ``owner``,
    which began at ``owner_began``.
    """

    pid: int
    began: int
    boot: str
    mark: str
    place: str
    owner: int
    owner_began: int


class Survivors:
    """The file of recorded processes, each with the mark from ``mark_of``: a digest of its token.

    A process belongs to the service that recorded it, and afterwards to the next one on the same state folder. A copy
    of the folder is at another ``place``, so its service never adopts, and never ends, a process of the original's.
    """

    def __init__(self, file: Path, mark_of: Callable[[str], str], place: str = "") -> None:
        self._file = file
        self._mark_of = mark_of
        self._place = place
        self._known: dict[str, _Known] = {}

    def find(self, belongs: Callable[[str, list[str]], bool]) -> Mapping[str, tuple[Adopted, str]]:
        """Returns the living processes of an earlier incarnation with their marks, by name, and forgets the others.

        ``belongs(name, argv)`` says whether the process of that name is started with these arguments.
        """
        found = {}
        for name, known in self._read().items():
            try:
                if known.boot != _boot() or not belongs(name, _argv(known.pid)):
                    continue
                if known.place != self._place or _serves_another(known):
                    log.warning("%s (process %d) serves another service, and is left alone", name, known.pid)
                    continue
                found[name] = Adopted(known.pid, known.began), known.mark
            except OSError:  # it has ended
                continue
            self._known[name] = known
        return found

    def note(self, name: str, pid: int) -> None:
        owner = os.getpid()
        try:
            began = began_of(pid)
        except OSError:  # it has ended
            return
        self._known[name] = _Known(pid, began, _boot(), self._mark_of(name), self._place, owner, began_of(owner))
        unfinished = self._file.with_name(f".{self._file.name}")
        try:
            unfinished.unlink(missing_ok=True)
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                json.dump({each: asdict(known) for each, known in self._known.items()}, stream)
            unfinished.replace(self._file)
        except OSError as error:  # a later life would start another one beside it, which has to wait for its end
            log.log(logging.WARNING if is_full(error) else logging.ERROR, "%s: %s", self._file, error.strerror)

    def _read(self) -> dict[str, _Known]:
        """Returns the recorded processes. A damaged file, or entry, names none, so new ones are started."""
        try:
            tree = json.loads(self._file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            log.warning("%s cannot be read, so no process is adopted: %s", self._file, error)
            return {}
        entries = tree.items() if isinstance(tree, dict) else ()
        found = {name: known for name, entry in entries if (known := _known(entry)) is not None}
        if not isinstance(tree, dict) or len(found) < len(tree):
            log.warning("%s is damaged, or of another release: not every process in it is adopted", self._file)
        return found


def _known(entry: object) -> _Known | None:
    types = get_type_hints(_Known)
    if not isinstance(entry, dict) or entry.keys() != types.keys():
        return None
    if any(type(entry[name]) is not kind for name, kind in types.items()):
        return None
    known = _Known(**entry)
    is_sound = 0 < known.pid <= _PID_MAX and 0 < known.owner <= _PID_MAX and _MARK.fullmatch(known.mark)
    return known if is_sound else None


def _serves_another(known: _Known) -> bool:
    try:
        is_it = known.owner != os.getpid() and began_of(known.owner) == known.owner_began
        return is_it and _stat(known.owner)[0] not in (b"Z", b"X")
    except OSError:
        return False


def began_of(pid: int) -> int:
    """Returns a process's start time in ticks since the boot. Raises OSError if there is no such process."""
    return int(_stat(pid)[_STARTED_FIELD])


def _stat(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat after the name, which may contain anything. The first is the process's state."""
    return (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()


def _argv(pid: int) -> list[str]:
    raw = (_PROC / str(pid) / "cmdline").read_bytes()
    return [part.decode(errors="replace") for part in raw.split(b"\0")[:-1]]


def _boot() -> str:
    return _BOOT_ID.read_text(encoding="ascii").strip()
