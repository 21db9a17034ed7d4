"""Bounds the time that the event loop is blocked: reports of many workers take turns."""

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

TURN_S: Final = 0.005  # longest turn of the loop; started work is finished


class MessageTurns:
    """Orders the handling of messages: ``async with turns:`` lets the first comer in first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._one = asyncio.Lock()
        self._began_s: float | None = None  # time of the first message in this turn; None: there was none

    async def __aenter__(self) -> Self:
        await self._one.acquire()
        if self._began_s is None:
            self._began_s = self._clock()
            asyncio.get_running_loop().call_soon(self._over)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._began_s is not None and self._clock() - self._began_s >= TURN_S:
                await asyncio.sleep(0)  # other messages get their turn
        finally:
            self._one.release()

    def _over(self) -> None:
        self._began_s = None
