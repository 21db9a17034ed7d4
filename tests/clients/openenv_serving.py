"""Servers of OpenEnv in their own environment, ``.venv-openenv``."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from dora.system.environment import child_environment
from tests.clients.environments import python_of
from tests.snippets import ROOT

SERVERS: Final = ROOT / "tests" / "clients" / "openenv_servers.py"


@asynccontextmanager
async def server(argv: Sequence[str | Path], folder: Path) -> AsyncIterator[str]:
    """Runs ``python ARGV... FD`` in this folder with a listening socket, and yields its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url, number = f"http://127.0.0.1:{listening.getsockname()[1]}", listening.fileno()
        argv = (python_of("openenv"), "-I", *argv, str(number))
        process = await asyncio.create_subprocess_exec(*argv, cwd=folder, env=child_environment(()), pass_fds=(number,))
    try:
        yield url
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def echo(folder: Path) -> AsyncIterator[str]:
    """OpenEnv's own echo environment, as ``openenv init`` makes it. It has room for one session."""
    init = ("-m", "openenv.cli", "init", "echo_env", "--output-dir", str(folder))
    process = await asyncio.create_subprocess_exec(
        python_of("openenv"), "-I", *init, env=child_environment(()), stdout=asyncio.subprocess.DEVNULL
    )
    assert await process.wait() == 0
    argv = ("-m", "uvicorn", "server.app:app", "--log-level", "warning", "--fd")
    async with server(argv, folder / "echo_env") as url:
        yield url
