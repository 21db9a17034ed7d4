"""Serves the metrics over HTTP: ``/metrics``, ``/hosts/NAME/metrics`` and ``/sd``, the discovery of these pages; and
the probes ``/live`` and ``/ready``.

Under TLS, a caller of other pages than the probes needs a certificate or a token of a role that may read the service's
state. At most ``PAGES_MAX`` pages are made at once.
"""

import contextlib
import logging
import re
from collections.abc import AsyncIterator
from typing import Final

from aiohttp import web

from dora.errors import DoraError
from dora.metrics.text import TEXT
from dora.orchestrator.metrics.exporter import HOST_PATH, SERVICE_PATH, Exporter
from dora.rpc.bearer import READS, bearer_of, check_bearer
from dora.rpc.errors import PermissionDenied
from dora.rpc.roles import ServiceTokens
from dora.system.probes import BoundedServer, Closed, listening, probe
from dora.tls.http import HttpTls

log = logging.getLogger("dora.service")

PAGES_MAX: Final = 4
OPTION: Final = "--metrics"
DISCOVERY_PATH: Final = "/sd"

_HOST_PAGE: Final = re.compile(HOST_PATH.format(name="([^/]+)"))
PLACES: Final = f"{SERVICE_PATH}, {HOST_PATH.format(name='NAME')} and {DISCOVERY_PATH}"


class MetricsServer(BoundedServer):
    """Answers scrapers and probes. If ``guard`` is None, everyone may read."""

    def __init__(self, exporter: Exporter, guard: HttpTls | None = None, tokens: ServiceTokens | None = None) -> None:
        self._exporter = exporter
        self._guard = guard
        self._tokens = tokens
        self._pages = 0
        super().__init__(self._answered)

    async def _answered(self, request: web.BaseRequest) -> web.Response:
        if (found := probe(request.path, self._exporter)) is not None:
            return found
        try:
            self._check(request)
        except DoraError as error:
            status = 403 if isinstance(error, PermissionDenied) else 401
            return web.Response(status=status, text=f"{error}\n", headers={"WWW-Authenticate": "Bearer"})
        if request.method not in ("GET", "HEAD"):
            return web.Response(status=405, text="GET is allowed\n")
        if request.path == DISCOVERY_PATH:
            return web.json_response(self._exporter.targets(request.host, request.scheme))
        if self._pages >= PAGES_MAX:
            return web.Response(status=503, text=f"{PAGES_MAX} pages are being made; repeat it later\n")
        self._pages += 1
        try:
            page = await self._page(request.path)
        finally:
            self._pages -= 1
        if page is None:
            return web.Response(status=404, text=f"{request.path[:80]} is no page or no connected host: {PLACES}\n")
        return web.Response(body=page, headers={"Content-Type": TEXT})

    def _check(self, request: web.BaseRequest) -> None:
        if self._guard is not None:
            token = bearer_of(request.headers.get("Authorization", ""))
            check_bearer(READS, self._guard.holder(request.transport), token, self._tokens)

    async def _page(self, path: str) -> bytes | None:
        if path == SERVICE_PATH:
            return await self._exporter.service()
        host = _HOST_PAGE.fullmatch(path)
        return None if host is None else await self._exporter.host(host[1])


@contextlib.asynccontextmanager
async def serving_metrics(
    listen: str, exporter: Exporter, guard: HttpTls | None = None, tokens: ServiceTokens | None = None
) -> AsyncIterator[str]:
    """Serves at ``listen`` (HOST:PORT); yields the actual address (port 0 takes a free one)."""
    server = MetricsServer(exporter, guard, tokens)
    listener = await listening(listen, server.connect if guard is None else guard.connecting(server.connect), OPTION)
    port = listener.sockets[0].getsockname()[1]
    address = f"{listen.rpartition(':')[0]}:{port}"
    scheme = "http" if guard is None else "https"
    log.info("metrics for Prometheus are at %s://%s%s", scheme, address, SERVICE_PATH)
    try:
        yield address
    finally:
        listener.close()
        if guard is not None:
            await guard.close()
        await server.close()
        exporter.close()


async def check_address(listen: str) -> None:
    """Raises InvalidValue if the metrics could not be served at this address; an empty one serves none."""
    if listen:
        (await listening(listen, Closed, OPTION)).close()
