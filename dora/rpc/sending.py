"""The messages that a client's call sends, over all attempts to make it."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any


class Sending:
    """The messages of one call, which a task of gRPC's reads once the service has proved itself.

    gRPC leaves this task behind if a call is refused, so it is ended here: it would still read messages.
    """

    def __init__(self, messages: AsyncIterable[Any]) -> None:
        """``proven`` is set once the service has proved itself: no message is sent before."""
        self.proven = asyncio.Event()
        self._messages = messages
        self._attempt = 0
        self._task: asyncio.Task[Any] | None = None

    def begin(self) -> AsyncIterator[Any]:
        """Returns the messages for one more attempt; the attempt before ends."""
        self.end()
        return self._each(self._attempt)

    def end(self) -> None:
        self._attempt += 1
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _each(self, attempt: int) -> AsyncIterator[Any]:
        if attempt != self._attempt:
            return
        self._task = asyncio.current_task()
        await self.proven.wait()
        async for message in self._messages:
            yield message
