"""A real Prometheus with the rules of deploy/, which scrapes one service."""

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator, Callable, Set
from pathlib import Path
from typing import Any, Final

import aiohttp

from dora.tls import Tls
from tests.snippets import ROOT

DEPLOYED: Final = ROOT / "deploy" / "prometheus"
PERIODS: Final = re.compile(r"(scrape_interval|evaluation_interval|refresh_interval|scrape_timeout): \d+s")
FIRING: Final = 'ALERTS{alertstate="firing"}'
POLL_S: Final = 0.1
LIMIT_S: Final = 120.0  # for an alert to fire or to clear


class Prometheus:
    """Answers queries. ``url``: of the server."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url = url
        self._session = session

    async def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer of the API. Raises AssertionError with Prometheus' words if it refuses."""
        async with self._session.get(f"{self._url}/api/v1/{path}", params=parameters) as reply:
            answer = await reply.json()
        assert answer["status"] == "success", f"{parameters}: {answer.get('error')}"
        return answer["data"]

    async def firing(self, expected: Set[str]) -> None:
        """Returns once these alerts fire and no others. Raises AssertionError with what fires instead."""
        await self.until(lambda found: _alerts(found) == expected, FIRING, f"{sorted(expected)} alone")

    async def ever_fired(self) -> set[str]:
        """The alerts that have fired at some time since Prometheus was started."""
        return await self.fired(86400.0)

    async def fired(self, last_s: float) -> set[str]:
        """The alerts that have fired at some time in the last seconds."""
        return _alerts(await self.query(f"last_over_time({FIRING}[{max(1, int(last_s))}s])"))

    async def until(
        self, condition: Callable[[list[Any]], bool], expression: str, what: str = "another result"
    ) -> None:
        """Queries again and again. Raises AssertionError with the last result."""
        found: list[Any] = []
        try:
            async with asyncio.timeout(LIMIT_S):
                async for found in self._results(expression):
                    if condition(found):
                        return
        except TimeoutError:
            raise AssertionError(f"{expression} is {found}, not {what}, after {LIMIT_S:g} s") from None

    async def _results(self, expression: str) -> AsyncIterator[list[Any]]:
        while True:
            yield await self.query(expression)
            await asyncio.sleep(POLL_S)

    async def query(self, expression: str) -> list[Any]:
        """The series of an expression now."""
        found: list[Any] = (await self.get("query", query=expression))["result"]
        return found


def _alerts(found: list[Any]) -> set[str]:
    return {each["metric"]["alertname"] for each in found}


def free_address(host: str = "127.0.0.1") -> str:
    """Returns an address of this machine that nothing listens at."""
    with socket.create_server((host, 0)) as free:
        return f"{host}:{free.getsockname()[1]}"


@contextlib.asynccontextmanager
async def scraping(
    binary: Path, service: str, folder: Path, rules: Path = DEPLOYED, tls: Tls | None = None
) -> AsyncIterator[Prometheus]:
    """Runs Prometheus with the deployed configuration, every second, on the metrics at ``service``. ``rules``: the
    folder of its rules. ``tls``: its certificate, for a service under TLS.
    """
    text = PERIODS.sub(r"\1: 1s", (DEPLOYED / "prometheus.yml").read_text())
    text, changed = re.subn(r"url: http://[^/]+/sd", f"url: {'https' if tls else 'http'}://{service}/sd", text)
    assert changed == 1
    if tls is not None:
        files = f"{{ca_file: {tls.ca}, cert_file: {tls.cert}, key_file: {tls.key}}}"
        text = text.replace("    http_sd_configs:", f"    tls_config: {files}\n    http_sd_configs:")
        text = text.replace("      - url:", f"      - tls_config: {files}\n        url:")
    for name in ("recording.yml", "alerts.yml"):
        text = text.replace(f"- {name}", f"- {rules / name}")
    file = folder / "prometheus.yml"
    file.write_text(text)
    address = free_address()
    process = await asyncio.create_subprocess_exec(
        binary,
        f"--config.file={file}",
        f"--web.listen-address={address}",
        f"--storage.tsdb.path={folder / 'data'}",
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    said = []
    while line := await process.stderr.readline():
        said.append(line.decode())
        if "Server is ready" in said[-1]:
            break
    reading = asyncio.create_task(process.stderr.read())
    try:
        assert process.returncode is None and said and "Server is ready" in said[-1], "".join(said)
        async with aiohttp.ClientSession() as session:
            yield Prometheus(f"http://{address}", session)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        await reading
