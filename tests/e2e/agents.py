"""Agents for tests: ``dora host`` as a process of its own."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from dora.orchestrator.main import ServiceHandle
from dora.rpc.roles import Role


@asynccontextmanager
async def agent(
    handle: ServiceHandle, name: str, log: Path, *options: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A host that joins; its agent is killed at the end, where it still lives, and its processes with it."""
    process = await joining(handle.address, handle.tokens[Role.HOST], name, log, *options)
    try:
        yield process
    finally:
        await ended(process)


async def ended(process: asyncio.subprocess.Process) -> None:
    """An agent is killed, where it still lives, and its processes with it."""
    if process.returncode is None:
        process.kill()
    await process.wait()


async def joining(
    address: str, token: str, name: str, log: Path, *options: str, inside: Sequence[str] = ()
) -> asyncio.subprocess.Process:
    """``inside``: the beginning of its command line, before Python."""
    argv = [sys.executable, "-m", "dora", "host", "--join", address, "--name", name, *options]
    with log.open("ab") as sink:
        return await asyncio.create_subprocess_exec(
            *inside,
            *argv,
            env={**os.environ, **({"DORA_TOKEN": token} if token else {})},
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )


def are_ready(workers: int) -> Any:
    """Returns a condition on a status: so many workers host a version."""
    return lambda status: sum(worker.version >= 0 for worker in status.workers) >= workers


def host(status: Any, name: str) -> Any:
    """Its line of ``dora hosts``."""
    return next(each for each in status.hosts if each.name == name)
