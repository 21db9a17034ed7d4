"""A client's connection: its channel, the proof of its token, and conversion of errors to DoraErrors."""

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, Self, TypeVar
from weakref import WeakKeyDictionary

import grpc
from grpc.aio import EOF  # type: ignore[attr-defined] # missing from the type stubs

from dora.errors import InvalidValue
from dora.rpc.channel import MAX_MESSAGE_BYTES, STREAMS_AT_ONCE, check_message_bytes
from dora.rpc.errors import ServiceUnavailable, from_rpc_error
from dora.rpc.proven import ProvenChannel, Prover, proven_channel
from dora.tls import Tls

CALL: Final = "_AioCall."  # the beginning of the names of gRPC's coroutines that wait for the end of a call
ENDS_WITHIN_S: Final = 1.0  # the calls of a closed channel
CALLS_EACH: Final = STREAMS_AT_ONCE // 2  # the service counts one for a while after its end
COUNT_MAX: Final = (1 << 31) - 1  # the maximum of any count in a message; a service allows less

_channels: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, int]] = WeakKeyDictionary()  # open ones of each loop

Reply = TypeVar("Reply", covariant=True)
Stub = TypeVar("Stub")
Result = TypeVar("Result")


class Method(Protocol[Reply]):
    """A unary-response method of a generated stub."""

    def __call__(self, request: Any, /, *, timeout: float | None = None) -> Awaitable[Reply]: ...


class Connection:
    """A connection that opens its channel at the first call, in the running event loop, and closes it once."""

    def __init__(
        self, address: str, token: str | Path, max_message_bytes: int = MAX_MESSAGE_BYTES, tls: Tls | None = None
    ) -> None:
        """If ``tls`` is None, it is that of DORA_TLS and the like. Raises InvalidValue for a token that is not
        printable ASCII, and for TLS files that cannot be used.
        """
        self.address = address
        self.another = partial(Connection, address, token, max_message_bytes, tls)  # makes one to the same service
        self._prover = Prover(address, token, tls=tls)
        self.max_message_bytes = max_message_bytes
        self._channel: ProvenChannel | None = None

    @property
    def channel(self) -> ProvenChannel:
        """Opens the channel. Raises InvalidValue for an address that is not host:port."""
        if self._channel is None:
            self._channel = proven_channel(self.address, self._prover, self.max_message_bytes)
            loop = asyncio.get_running_loop()
            _channels[loop] = _channels.get(loop, 0) + 1
        return self._channel

    def stub(self, kind: Callable[[grpc.aio.Channel], Stub]) -> Stub:
        """Returns a generated stub, for example ``stub(TrainerStub)``. Raises as :attr:`channel`."""
        return kind(self.channel)

    async def call(self, method: Method[Reply], request: Any, timeout_s: float | None = None) -> Reply:
        """Sends one message and returns the reply.

        Raises LimitExceeded before sending a message over the limit, ServiceUnavailable, or the service's DoraError.
        """
        check_message_bytes(type(request).__name__, request, self.max_message_bytes)
        try:
            return await method(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def upload(self, method: Method[Reply], messages: AsyncIterable[Any]) -> Reply:
        """Streams messages and returns the one reply. Raises as :meth:`call`."""
        try:
            return await method(messages)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def read(self, stream: Any) -> Any | None:
        """Returns the next message of a response stream, or None at its end. Raises as :meth:`call`."""
        try:
            message = await stream.read()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return None if message is EOF else message

    async def close(self) -> None:
        if self._channel is None:
            return
        channel, self._channel = self._channel, None
        loop = asyncio.get_running_loop()
        _channels[loop] = left = max(0, _channels.get(loop, 0) - 1)
        await channel.close(None)
        if not left:
            await _calls_ended()


async def _calls_ended() -> None:
    """Waits until gRPC has delivered the ends of the loop's cancelled calls.

    A loop may close once its last client has. gRPC would deliver what is left to the next loop of the process, which
    logs "Event loop is closed".
    """
    ending = {task for task in asyncio.all_tasks() if getattr(task.get_coro(), "__qualname__", "").startswith(CALL)}
    if ending:
        await asyncio.wait(ending, timeout=ENDS_WITHIN_S)


class Connections:
    """Connections to one service for many calls at once. One has at most ``CALLS_EACH``: the service refuses more than
    it allows on a connection, and its caller would wait for those that are open.
    """

    def __init__(self, first: Connection) -> None:
        self._calls: dict[Connection, int] = {first: 0}  # open ones

    @contextmanager
    def for_a_call(self) -> Iterator[Connection]:
        """Yields the connection with the fewest calls, for one more. If all are full, yields a new one."""
        connection = min(self._calls, key=lambda each: self._calls[each])
        if self._calls[connection] >= CALLS_EACH:
            connection = connection.another()
            self._calls[connection] = 0
        self._calls[connection] += 1
        try:
            yield connection
        finally:
            self._calls[connection] -= 1

    async def close(self) -> None:
        for connection in self._calls:
            await connection.close()


class Client:
    """A client with a connection of its own. Use it with ``async with``, or call :meth:`close`."""

    def __init__(
        self,
        address: str,
        token: str | Path = "",
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        tls: Tls | None = None,
    ) -> None:
        """``token`` may be the Path of a private file that has it, which is read again for each session. It may be
        empty for a client whose certificate has a role. Raises as :class:`Connection`.
        """
        self._connection = Connection(address, token, max_message_bytes, tls)

    async def close(self) -> None:
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


@dataclass(slots=True)
class Patience:
    """Retry delays of a client, from ``first_s`` to ``longest_s`` and ``total_s`` in all. Progress resets them.

    ``field`` is the client's setting of ``total_s``, which its error names.
    """

    total_s: float
    field: str = "connect_s"
    first_s: float = 0.05
    longest_s: float = 5.0
    _next_s: float = 0.0
    _until_s: float | None = None  # event loop time at which retries end

    def progress(self) -> None:
        self._until_s = None

    async def wait(self, error: ServiceUnavailable) -> None:
        """Waits before the next retry. Raises ServiceUnavailable, caused by ``error``, after ``total_s``."""
        await asyncio.sleep(self.next_wait_s(asyncio.get_running_loop().time(), error))

    def next_wait_s(self, now_s: float, error: ServiceUnavailable) -> float:
        """The delay before the next retry, at ``now_s``. Raises as :meth:`wait`."""
        if self._until_s is None:
            self._until_s, self._next_s = now_s + self.total_s, self.first_s
        wait_s = self._next_s
        if now_s + wait_s > self._until_s:
            said = f"not reachable for {self.total_s:g} s: {error}"
            raise ServiceUnavailable(said, self.field, self.total_s) from error
        self._next_s = min(2 * wait_s, self.longest_s)
        return wait_s


async def until_answered(call: Callable[[], Awaitable[Result]], within_s: float) -> Result:
    """Repeats a call, which may be, until the service answers. Raises ServiceUnavailable after ``within_s``."""
    patience = Patience(within_s)
    while True:
        try:
            return await call()
        except ServiceUnavailable as error:
            await patience.wait(error)


def check_count(field: str, value: int) -> None:
    """Raises InvalidValue for a count that does not fit into a message."""
    if type(value) is not int or not 0 <= value <= COUNT_MAX:
        raise InvalidValue(field, value, f"a whole number from 0 to {COUNT_MAX}")
