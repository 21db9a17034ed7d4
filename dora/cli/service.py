"""One call to a running service from a synchronous command."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from dora.cli.token import find_token
from dora.client import Operator
from dora.rpc.errors import ServiceUnavailable, Unauthenticated

Answer = TypeVar("Answer")


def ask(address: str, token: str | None, call: Callable[[Operator], Awaitable[Answer]]) -> Answer:
    """Runs ``call`` with a connected operator. ``token`` None or empty: what a service on this host left."""

    secret = token or find_token(address)

    async def run() -> Answer:
        async with Operator(address, token=secret) as operator:
            try:
                return await call(operator)
            except ServiceUnavailable as error:
                raise ServiceUnavailable(f"no service answers at {address}: {error}") from error
            except Unauthenticated as error:
                if secret:
                    raise
                allowed = "the service's secret: --token, DORA_TOKEN, or a service that you started on this host"
                raise Unauthenticated("token", "(none)", allowed) from error

    return asyncio.run(run())
