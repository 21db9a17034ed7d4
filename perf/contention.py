"""Measures how long processes of this host were ready to run without a core: Linux's /proc/PID/schedstat."""

import subprocess
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SAMPLE_S = 0.5


@dataclass(frozen=True)
class Shares:
    """Seconds of main threads: on a core, and ready without one."""

    ran_s: float = 0.0
    waited_s: float = 0.0

    def since(self, before: "Shares") -> float:
        """Returns the share of the time without a core, of that in which they wanted one."""
        ran_s, waited_s = self.ran_s - before.ran_s, self.waited_s - before.waited_s
        return waited_s / (ran_s + waited_s)


def shares(pids: Iterable[int]) -> Shares:
    """Sums over these processes' main threads."""
    fields = [Path(f"/proc/{pid}/schedstat").read_text().split() for pid in pids]
    return Shares(sum(int(each[0]) for each in fields) / 1e9, sum(int(each[1]) for each in fields) / 1e9)


class Children:
    """Watches what a process has started, from time to time, until told to stop: ``last`` is as of shortly before."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.last = Shares()
        self._children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "Children":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            try:
                found = shares(int(pid) for pid in self._children.read_text().split())
            except OSError:
                continue  # one of them has just ended
            if found.ran_s >= self.last.ran_s:  # else some have ended
                self.last = found
