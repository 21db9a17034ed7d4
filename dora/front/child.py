"""The front of `dora serve --http`: a process that ends with the service, and begins again if it dies."""

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from dora.front.listening import INHERITED, listening_socket, url_of
from dora.system.environment import child_environment
from dora.system.secret_file import read_token

log = logging.getLogger("dora.front")

PAUSE_S: Final = 1.0  # between two starts
ENDS_WITHIN_S: Final = 10.0


class FrontProcess:
    """Runs a front from ``start`` to ``stop``.

    This process has the listening socket, so agents that come while the front is started again only wait.
    """

    def __init__(self, listen: str, key_file: Path | None = None) -> None:
        """Raises InvalidValue for an address that is not free, or that others reach while any key will do."""
        if key_file is not None:
            read_token(key_file, "--http-key-file")
        self._listening = listening_socket(listen, has_key=key_file is not None)
        self._key_file = key_file
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return url_of(self._listening)

    def start(self, service: str, token: str, model: Path, context_tokens: int) -> None:
        """Starts it at a service whose model's folder is on this host."""
        options: dict[str, object] = {"--service": service, "--http": f"{INHERITED}{self._listening.fileno()}"}
        options |= {"--model": model, "--max-model-len": context_tokens}
        if self._key_file is not None:
            options["--key-file"] = self._key_file
        words = [str(word) for option in options.items() for word in option]
        argv = ["-m", "dora.host.bound", str(os.getpid()), "-m", "dora", "front", *words]
        environment = child_environment(("DORA_TLS*",), {"DORA_TOKEN": token})
        self._task = asyncio.create_task(self._kept_running(argv, environment))

    async def stop(self) -> None:
        """Ends the process, if it was started."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        self.close()

    def close(self) -> None:
        """Frees the address."""
        self._listening.close()

    async def _kept_running(self, argv: Sequence[str], environment: dict[str, str]) -> None:
        passed = (self._listening.fileno(),)
        while True:
            process = await asyncio.create_subprocess_exec(sys.executable, *argv, env=environment, pass_fds=passed)
            try:
                code = await process.wait()
            except asyncio.CancelledError:
                await _ended(process)
                raise
            log.warning("the front has ended with code %d: it is started again", code)
            await asyncio.sleep(PAUSE_S)


async def _ended(process: asyncio.subprocess.Process) -> None:
    process.terminate()
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), ENDS_WITHIN_S)
    if process.returncode is None:
        process.kill()
        await process.wait()
