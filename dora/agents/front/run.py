"""Runs a front as a process."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path

from dora.agents.chat.tool_calls import FORMATS
from dora.agents.front.app import Mount, serving
from dora.agents.front.gateway import FrontLimits, Gateway
from dora.agents.front.listening import listening_socket
from dora.agents.front.model import served_model
from dora.agents.front.service import RECONNECT_S, Service
from dora.client.connection import Patience
from dora.errors import InvalidValue, one_of
from dora.rpc.channel import is_wildcard
from dora.rpc.errors import ServiceUnavailable
from dora.rpc.roles import ServiceTokens
from dora.tls import Tls
from dora.tls.files import LOOPBACK, check_names
from dora.tls.http import HttpTls

log = logging.getLogger("dora.front")


@dataclass(frozen=True, slots=True)
class FrontOptions:
    """Options of a front. ``token`` is of the role environment, or of one that may do more; if empty, the certificate
    has the role. A ``model`` of None is the service's folder, an empty ``key`` accepts any, an empty ``tool_format`` is
    the template's. ``tls`` protects all connections unless it is None. If ``mutual``, agents show certificates.
    """

    service: str
    token: str = field(repr=False)
    listen: str
    model: Path | None = None
    key: str = field(default="", repr=False)
    tool_format: str = ""
    limits: FrontLimits = field(default_factory=FrontLimits)
    tls: Tls | None = None
    mutual: bool = True
    service_wait_s: float = RECONNECT_S  # how long a front without ``model`` waits for the service at its start


@asynccontextmanager
async def front(options: FrontOptions, mount: Mount | None = None) -> AsyncIterator[str]:
    """Serves a front and yields its URL. Raises InvalidValue, Unauthenticated, ServiceUnavailable."""
    if options.tool_format and options.tool_format not in FORMATS:
        raise InvalidValue("--tool-format", options.tool_format, one_of(options.tool_format, FORMATS))
    tls = None if options.tls is None else HttpTls(options.tls, mutual=options.mutual)
    has_key = bool(options.key) or (tls is not None and tls.mutual)
    with closing(listening_socket(options.listen, has_key=has_key)) as listening:
        if options.tls is not None:
            host = str(listening.getsockname()[0])
            check_names(options.tls, options.tls.read(), LOOPBACK[0] if is_wildcard(host) else host)
        async with _served(options, listening, tls, mount) as url:
            yield url


@asynccontextmanager
async def _served(
    options: FrontOptions, listening: socket.socket, tls: HttpTls | None, mount: Mount | None
) -> AsyncIterator[str]:
    async with Service(options.service, options.token, tls=options.tls) as service:
        folder = options.model or await _model_of(service, options)
        if not folder.is_dir():
            raise InvalidValue("--model", str(folder), "the model's folder on this host, for its tokenizer")
        model = await asyncio.to_thread(served_model, folder, None, FORMATS.get(options.tool_format))
        tokens = await asyncio.to_thread(ServiceTokens, options.token) if options.token and tls is not None else None
        gateway = Gateway(service, model, key=options.key, limits=options.limits, tls=tls, tokens=tokens)
        async with serving(gateway, listening, mount) as url, service.told_of(url):
            yield url


async def _model_of(service: Service, options: FrontOptions) -> Path:
    """Returns the model's folder as the service names it, once it answers. Raises ServiceUnavailable if it does not."""
    patience, is_told = Patience(options.service_wait_s), False
    while True:
        try:
            return await service.model()
        except ServiceUnavailable as error:
            if not is_told:
                most_s = options.service_wait_s
                log.warning("waiting up to %g s for the service at %s: %s", most_s, options.service, error)
            is_told = True
            await patience.wait(error)


async def run_front(
    options: FrontOptions, stop: asyncio.Event, ready: Callable[[str], None], mount: Mount | None = None
) -> None:
    """Serves until ``stop``. Raises as :func:`front`."""
    async with front(options, mount) as url:
        ready(url)
        await stop.wait()
