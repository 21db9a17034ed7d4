"""Limits of an environment's process. It ends itself at one of them, and is started again by whoever keeps it."""

import logging
import os
import threading
import time
from typing import Final, Protocol

from dora.agents.environment.calls import STUCK_MAX, Calls
from dora.agents.environment.spec import one_line
from dora.rewards.limits import Usage, UserLimits
from dora.system.process_tree import adopt_orphans, descendants, end_descendants

log = logging.getLogger("dora.environment")

LOOK_S: Final = 1.0
ENDED_CODE: Final = 75  # of a process that ended itself at a limit


class Ending(Protocol):
    def __call__(self, reason: str, *, is_blocked: bool) -> None: ...


class Guard:
    """Limits this process. Environments, in ``calls``, may block the event loop for ``blocked_s`` at most. ``ending``
    is told why the process ends; by default the log is.
    """

    def __init__(
        self, limits: UserLimits, blocked_s: float, calls: Calls | None = None, ending: Ending | None = None
    ) -> None:
        self._limits = limits
        self._blocked_s = blocked_s
        self._calls = calls
        self._ending = ending
        self._usage = Usage(os.getpid(), limits)
        self._seen_s = time.monotonic()

    def begin(self) -> None:
        self.tick()
        adopt_orphans()
        self._limits.impose()
        threading.Thread(target=self._watch, name="guard", daemon=True).start()

    def tick(self) -> None:
        """Notes that the event loop runs."""
        self._seen_s = time.monotonic()

    def described(self, error: BaseException) -> str:
        """Returns an error as one line, with the limit behind it, if any."""
        limit = self._limits.exceeded(error)
        return f"{limit}; {one_line(error)}" if limit else one_line(error)

    def reason(self) -> str:
        """Returns why the process has to end, or ""."""
        blocked_s = time.monotonic() - self._seen_s
        if blocked_s > self._blocked_s:
            return f"has blocked the event loop for {blocked_s:.0f} s (environment.timeout_s = {self._blocked_s:g})"
        if reason := self._usage.idle():
            return reason
        if self._calls is not None and self._calls.stuck > STUCK_MAX:
            return f"has left {self._calls.stuck} calls running that were cancelled, more than {STUCK_MAX}"
        started = len(descendants())
        if started > self._limits.processes:
            return f"has started {started} processes, more than environment.processes = {self._limits.processes}"
        return ""

    def _watch(self) -> None:
        while not (reason := self.reason()):
            time.sleep(LOOK_S)
        if self._ending is None:
            log.error("the environment %s: its process ends", reason)
        else:
            self._ending(reason, is_blocked=time.monotonic() - self._seen_s > self._blocked_s)
        end_descendants()
        os._exit(ENDED_CODE)
