"""Runs a front as a process."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path

from dora.chat.tool_calls import FORMATS
from dora.errors import InvalidValue, one_of
from dora.front.app import Mount, serving
from dora.front.door import Door, Limits
from dora.front.listening import listening_socket
from dora.front.model import served_model
from dora.front.service import Service
from dora.models import context_tokens


@dataclass(frozen=True, slots=True)
class FrontOptions:
    """``model`` None: the service's folder. ``key`` empty: any key is accepted. ``tool_format`` empty: the template's.

    ``context_tokens`` 0: the model's own.
    """

    service: str
    token: str = field(repr=False)
    listen: str
    model: Path | None = None
    key: str = field(default="", repr=False)
    tool_format: str = ""
    context_tokens: int = 0
    limits: Limits = field(default_factory=Limits)


@asynccontextmanager
async def front(options: FrontOptions, mount: Mount | None = None) -> AsyncIterator[str]:
    """A front that serves, and its URL. ``mount`` as in ``application``.

    Raises InvalidValue, Unauthenticated, ServiceUnavailable.
    """
    if options.tool_format and options.tool_format not in FORMATS:
        raise InvalidValue("--tool-format", options.tool_format, one_of(options.tool_format, FORMATS))
    with closing(listening_socket(options.listen, has_key=bool(options.key))) as listening:
        async with _served(options, listening, mount) as url:
            yield url


@asynccontextmanager
async def _served(options: FrontOptions, listening: socket.socket, mount: Mount | None) -> AsyncIterator[str]:
    async with Service(options.service, options.token) as service:
        folder = options.model or await service.model()
        if not folder.is_dir():
            raise InvalidValue("--model", str(folder), "the model's folder on this host, for its tokenizer")
        model = await asyncio.to_thread(served_model, folder, None, FORMATS.get(options.tool_format))
        service.context_tokens = options.context_tokens or context_tokens(folder) or 0
        door = Door(service, model, key=options.key, limits=options.limits)
        async with serving(door, listening, mount) as url:
            yield url


async def run_front(
    options: FrontOptions, stop: asyncio.Event, ready: Callable[[str], None], mount: Mount | None = None
) -> None:
    """Serves until ``stop``. Raises as :func:`front`."""
    async with front(options, mount) as url:
        ready(url)
        await stop.wait()
