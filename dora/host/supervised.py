"""A Python process that ends with this one, and is started again if it dies."""

import asyncio
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Final

from dora.system.environment import HANDED, SECRETS, handed

log = logging.getLogger("dora.host")

PAUSE_S: Final = 1.0  # between two starts
ENDS_WITHIN_S: Final = 10.0


class SupervisedProcess:
    """Runs ``python ARGV...`` until ``stop``. ``name`` is for the log. It gets the open files ``passed``. Its output
    goes to ``log``, or to this process's own. Secrets among the variables are handed to it in an open file.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        environment: Mapping[str, str],
        passed: Sequence[int] = (),
        log: Path | None = None,
    ) -> None:
        self._name = name
        self._argv = ("-m", "dora.host.bound", str(os.getpid()), *argv)
        self._environment = {name: value for name, value in environment.items() if name not in SECRETS}
        self._secrets = {name: value for name, value in environment.items() if name in SECRETS}
        self._passed = tuple(passed)
        self._log = log
        self._task = asyncio.create_task(self._keep_running())

    async def stop(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _keep_running(self) -> None:
        while True:
            secrets = handed(self._secrets)
            with nullcontext() if self._log is None else self._log.open("ab") as output, os.fdopen(secrets):
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *self._argv,
                    env={**self._environment, HANDED: str(secrets)},
                    stdout=output,
                    stderr=output,
                    pass_fds=(*self._passed, secrets),
                    start_new_session=True,  # Ctrl-C is for this process, which drains first
                )
            try:
                code = await process.wait()
            except asyncio.CancelledError:
                await _ended(process)
                raise
            log.warning("%s has ended with code %d: it is started again", self._name, code)
            await asyncio.sleep(PAUSE_S)


async def _ended(process: asyncio.subprocess.Process) -> None:
    process.terminate()
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), ENDS_WITHIN_S)
    if process.returncode is None:
        process.kill()
        await process.wait()
