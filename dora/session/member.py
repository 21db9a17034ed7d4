"""The connection of a member (worker, pool or host agent) to its service.

    connect, hello ─▶ session ─▶ the end, with a reason
          ▲              │
          └── live on ◀──┘ the connection was lost: for a stated time, with one attempt after another

A host's agent runs the harness in its event loop. A worker and a pool have none, because an engine may need its own:
their coroutines never wait, and ``run_blocking`` runs them.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, Final

from dora.errors import Conflict, DoraError, LimitExceeded
from dora.rpc.errors import ServiceUnavailable

TOLD_TO_END: Final = "told to end"


class Member(ABC):
    """A process that is connected to a service, in one session after another. Each session is an epoch of its own."""

    pause_s: ClassVar[float] = 0.2  # between two attempts; doubled at each, up to
    pause_max_s: ClassVar[float] = 1.0

    def __init__(self, is_stopped: Callable[[], bool]) -> None:
        self._is_stopped = is_stopped
        self.has_joined = False  # in the latest attempt: the service has said welcome
        self.was_joined = False  # in any attempt

    async def stay_connected(self) -> str:
        """Connects repeatedly; returns the reason of the member's end.

        Raises the service's refusal, or ServiceUnavailable, once either has lasted longer than ``patience_s``.
        """
        since_s, pause_s = time.monotonic(), self.pause_s
        while True:
            self.has_joined = False
            error: DoraError = ServiceUnavailable("the stream has ended")
            try:
                if (reason := await self.run_session()) is not None:
                    return reason
            except (ServiceUnavailable, Conflict, LimitExceeded) as failed:
                error = failed.with_traceback(None)  # its frames would hold the session, and so memory of KV
            if self.has_joined:
                since_s, pause_s, self.was_joined = time.monotonic(), self.pause_s, True
            if self._is_stopped():
                return TOLD_TO_END
            if time.monotonic() - since_s >= self.patience_s(error):
                raise error
            await self.live_on(pause_s, error)
            pause_s = min(2 * pause_s, self.pause_max_s)

    @abstractmethod
    async def run_session(self) -> str | None:
        """Connects with a hello and obeys. Sets ``has_joined``. Returns the reason for which the member ends, or None
        if the stream ended without one. Raises ServiceUnavailable, and the service's refusal.
        """

    @abstractmethod
    def patience_s(self, error: DoraError) -> float:
        """Returns how long this error may last since the start or the last session. At 0 it ends the member."""

    @abstractmethod
    async def live_on(self, pause_s: float, error: DoraError) -> None:
        """Lives without a service for so long, or until it is told to end."""


def run_blocking(coroutine: Coroutine[Any, Any, str]) -> str:
    """Runs a coroutine that never waits, without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return str(end.value)
    raise RuntimeError("a coroutine that must not wait has waited")
