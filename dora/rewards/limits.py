"""Limits of memory, open files, processes and calls for user functions.

The kernel enforces memory and open files of each process (``UserLimits.impose``), so that a call which needs too much
fails with an error that names the setting (``exceeded``). The supervisor looks at the whole after each call
(``Usage``), and has a process that leaks replaced before a call fails for it.
"""

import errno
import os
import resource
import time
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Final, Self

from dora.system.process_tree import descendants

MIB: Final = 1 << 20
REPLACED_SHARE: Final = 0.75  # of memory or open files: a process that keeps more after a call is replaced
REPORT_BYTES: Final = 32 << 20  # beyond the limit, to report that it was reached
CALLS_A_LOOK: Final = 64  # between two looks at all processes, each of which takes some milliseconds
LOOK_S: Final = 0.25  # between two looks at a function's process during one call
ALL_LOOK_S: Final = 1.0  # until the first look at all processes during one call; doubles


@dataclass(frozen=True, slots=True)
class UserLimits:
    """Limits on user code: the settings of the same names in ``section``, ``reward`` by default."""

    memory_mb: int = 4096
    open_files: int = 1024
    processes: int = 256
    calls_max: int = 0
    section: str = "reward"

    @property
    def memory_bytes(self) -> int:
        return self.memory_mb * MIB

    def as_argument(self) -> str:
        return ",".join(map(str, astuple(self)))

    @classmethod
    def from_argument(cls, text: str) -> Self:
        *numbers, section = text.split(",")
        memory_mb, open_files, processes, calls_max = map(int, numbers)
        return cls(memory_mb, open_files, processes, calls_max, section)

    def impose(self) -> None:
        """Limits this process and all that it starts. A lower limit of the surroundings stays."""
        _limit(resource.RLIMIT_DATA, self.memory_bytes, self.memory_bytes + REPORT_BYTES)
        _limit(resource.RLIMIT_NOFILE, self.open_files, self.open_files)

    def exceeded(self, error: BaseException) -> str:
        """Returns the sentence that names the limit behind an error of user code, or "".

        If that limit is the memory, it is raised, so that the error can be reported.
        """
        cause: BaseException | None = error
        for _ in range(16):  # an error that was caught may be the cause of this one
            if cause is None:
                break
            if isinstance(cause, MemoryError) or _says(cause, errno.ENOMEM):
                _, hard = resource.getrlimit(resource.RLIMIT_DATA)
                resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
                return f"the limit is {self.section}.memory_mb = {self.memory_mb}"
            if _says(cause, errno.EMFILE):
                return f"the limit is {self.section}.open_files = {self.open_files}"
            cause = cause.__cause__ or cause.__context__
        return ""


DEFAULT_LIMITS: Final = UserLimits()


class Usage:
    """Measures the memory, files and processes of a user process and its descendants."""

    def __init__(self, process_id: int, limits: UserLimits) -> None:
        self._id = process_id
        self._limits = limits
        self._calls = 0
        self._look_s = self._all_look_s = 0.0
        self._all_wait_s = ALL_LOOK_S

    def begin(self) -> None:
        now_s = time.monotonic()
        self._look_s, self._all_look_s, self._all_wait_s = now_s + LOOK_S, now_s + ALL_LOOK_S, ALL_LOOK_S

    def during(self) -> str:
        """Returns why the present call has to be ended, or "". Looks rarely."""
        now_s = time.monotonic()
        if now_s < self._look_s:
            return ""
        self._look_s = now_s + LOOK_S
        most_bytes = self._limits.memory_bytes + REPORT_BYTES
        if (used_bytes := _used_bytes(self._id, most_bytes)) > most_bytes:
            return self._memory(used_bytes)
        if now_s < self._all_look_s:
            return ""
        self._all_wait_s *= 2
        self._all_look_s = now_s + self._all_wait_s
        return self._all()

    def after(self) -> str:
        """Returns why the process has to be replaced after a call, or ""."""
        self._calls += 1
        if reason := self.idle():
            return reason
        if self._calls % CALLS_A_LOOK == 0 and (reason := self._all()):
            return reason
        if self._calls == self._limits.calls_max:
            return f"has served {self._limits.section}.calls_max = {self._calls:,} calls"
        return ""

    def idle(self) -> str:
        """Returns why the process has to be replaced, by a look at it alone."""
        most_bytes = int(REPLACED_SHARE * self._limits.memory_bytes)
        if (used_bytes := _used_bytes(self._id, most_bytes)) > most_bytes:
            return self._memory(used_bytes)
        files = _open_files(self._id)
        if files > REPLACED_SHARE * self._limits.open_files:
            return f"has {files:,} open files of {self._limits.section}.open_files = {self._limits.open_files:,}"
        return ""

    def _all(self) -> str:
        every = descendants(ended_too=True)
        if len(every) - 1 > self._limits.processes:
            left = f"has left {len(every) - 1} processes behind"
            return f"{left}, more than {self._limits.section}.processes = {self._limits.processes}"
        if sum(_statm_bytes(each)[0] for each in every) > self._limits.memory_bytes:
            used_bytes = sum(_sum_bytes(each, "smaps_rollup", ("Pss_Anon:", "Pss_Shmem:")) for each in every)
            if used_bytes > self._limits.memory_bytes:
                return self._memory(used_bytes)
        return ""

    def _memory(self, used_bytes: int) -> str:
        return f"uses {used_bytes // MIB:,} MiB of {self._limits.section}.memory_mb = {self._limits.memory_mb:,}"


def _limit(kind: int, soft: int, hard: int) -> None:
    _, most = resource.getrlimit(kind)
    if most != resource.RLIM_INFINITY:
        soft, hard = min(soft, most), min(hard, most)
    resource.setrlimit(kind, (soft, hard))


def _says(error: BaseException, number: int) -> bool:
    """Returns whether ``error`` is the system's error ``number``, or quotes it, as libraries do."""
    if isinstance(error, OSError) and error.errno == number:
        return True
    try:
        return os.strerror(number) in str(error)
    except BaseException:  # an error of user code may raise anything, SystemExit too
        return False


def _used_bytes(process_id: int, enough_bytes: int) -> int:
    """Returns a process's memory, by the cheap count if that is at most ``enough_bytes``.

    Pages of files do not count: the kernel drops them when it needs memory.
    """
    resident, data = _statm_bytes(process_id)
    if max(resident, data) > enough_bytes:
        resident = _sum_bytes(process_id, "status", ("RssAnon:", "RssShmem:"))
    return max(resident, data)


def _statm_bytes(process_id: int) -> tuple[int, int]:
    """Returns resident memory with the pages of files, and what RLIMIT_DATA counts (proc(5), ``statm``)."""
    try:
        _, resident, _, _, _, data, _ = map(int, Path(f"/proc/{process_id}/statm").read_bytes().split())
    except OSError:  # it has ended
        return 0, 0
    return resident * resource.getpagesize(), data * resource.getpagesize()


def _sum_bytes(process_id: int, file: str, names: tuple[str, ...]) -> int:
    try:
        lines = Path(f"/proc/{process_id}/{file}").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:  # it has ended
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(names))


def _open_files(process_id: int) -> int:
    folder = f"/proc/{process_id}/fd"
    try:
        return os.stat(folder).st_size or len(os.listdir(folder))  # Linux before 6.2 gives no size
    except OSError:  # it has ended
        return 0
