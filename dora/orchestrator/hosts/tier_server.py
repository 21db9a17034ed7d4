"""The server of the shared KV tier: a process of the service, restarted when it dies, stopped with the service.

The service never waits for it. Workers connect to it by themselves, and without it find nothing in the tier.
"""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final

from dora.config import Config, KvConfig
from dora.errors import InvalidValue
from dora.kvtier import server
from dora.orchestrator.recording.storage import RUN_FOLDER, Storage
from dora.rpc import dora_pb2 as pb
from dora.system.environment import child_environment

log = logging.getLogger("dora.service")

SCRIPT: Final = Path(server.__file__)
LOG_FILE: Final = "kv-tier.log"
START_S: Final = 120.0  # until its first message: it imports torch
SILENCE_S: Final = 15.0  # it sends a message each second
STOP_S: Final = 10.0
PAUSE_S: Final = 0.5  # before a restart; doubled at each death, up to
PAUSE_MOST_S: Final = 15.0
HEALTHY_S: Final = 30.0  # a process that ran for so long is restarted quickly
SHARED_MEMORY: Final = Path("/dev/shm")


async def check_tier(config: Config) -> str:
    """Describes the tier's server. Raises InvalidValue if it cannot run: no LMCache, another version, no room."""
    kv = config.kv
    if kv.tier == "none":
        return "none"
    found = await _version(kv)
    if found != server.VERSION:
        allowed = f"with LMCache {server.VERSION} installed (docs/operations.md says how; found: {found})"
        raise InvalidValue("kv.tier_python", kv.tier_python or sys.executable, allowed)
    free_mb = shutil.disk_usage(SHARED_MEMORY).free >> 20
    if kv.tier_mb > free_mb:
        raise InvalidValue("kv.tier_mb", kv.tier_mb, f"at most {free_mb}, the free space of {SHARED_MEMORY}")
    if config.service.run_folder:
        check_socket(Path(config.service.run_folder))
    return f"lmcache {found}, {kv.tier_mb} MiB"


def check_socket(run_folder: Path) -> None:
    """Raises InvalidValue if the path of the tier's socket is longer than Unix allows."""
    over = len(os.fsencode(server.socket_of(run_folder))) - server.SOCKET_PATH_MAX
    if over > 0:
        allowed = f"shorter by {over} bytes, for the socket of the KV tier in it"
        raise InvalidValue("service.run_folder", str(run_folder), allowed)


async def _version(kv: KvConfig) -> str:
    try:
        process = await asyncio.create_subprocess_exec(
            *_command(kv), stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, env=child_environment()
        )
        said, _ = await process.communicate()
    except OSError as error:
        return f"no Python ({error.strerror})"
    return said.decode(errors="replace").strip() or "nothing"


def _command(kv: KvConfig) -> list[str]:
    return [kv.tier_python or sys.executable, "-P", str(SCRIPT)]


class TierServer:
    """Runs the tier's server. A chunk has ``chunk_tokens``, whole blocks of the workers' engines."""

    def __init__(self, kv: KvConfig, chunk_tokens: int, run_folder: Path, storage: Storage) -> None:
        self._kv = kv
        self._chunk_tokens = chunk_tokens
        self._run_folder = run_folder.resolve()
        self._storage = storage
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._held: dict[str, int] | None = None  # the server's last message; None: it is down
        self._reason = "it is starting"
        self._restarts = 0

    @property
    def endpoint(self) -> str:
        return f"ipc://{server.socket_of(self._run_folder)}"

    @property
    def pid(self) -> int:
        """Returns the pid of the process, or 0."""
        return 0 if self._process is None or self._process.returncode is not None else self._process.pid

    def status(self, workers: int) -> pb.KvTierStatus:
        held = self._held
        return pb.KvTierStatus(
            up=held is not None,
            **(held or {}),
            workers=workers,
            restarts=self._restarts,
            reason="" if held is not None else self._reason,
        )

    def start(self) -> None:
        check_socket(self._run_folder)
        self._task = asyncio.create_task(self._keep(), name="kv-tier")

    async def close(self) -> None:
        """Asks the server to end, then kills it. Its shared memory and socket are removed."""
        self._closing.set()
        if self._task is None:
            return
        self._signal(asyncio.subprocess.Process.terminate)
        _, slow = await asyncio.wait({self._task}, timeout=STOP_S)
        if slow:
            self._signal(asyncio.subprocess.Process.kill)
            await self._task
        server.remove_left(self._run_folder)

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        pause_s = PAUSE_S
        while not self._closing.is_set():
            began_s = loop.time()
            self._reason = await self._incarnation()
            self._held = None
            if self._closing.is_set():
                return
            self._restarts += 1
            log.warning("the KV tier's server is restarted: %s; meanwhile workers compute its KV again", self._reason)
            pause_s = PAUSE_S if loop.time() - began_s > HEALTHY_S else min(2 * pause_s, PAUSE_MOST_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), pause_s)

    async def _incarnation(self) -> str:
        """Runs one process from start to end. Returns the reason of its end."""
        try:
            with self._sink() as sink:
                self._process = process = await asyncio.create_subprocess_exec(
                    *_command(self._kv),
                    str(self._run_folder),
                    str(self._kv.tier_mb),
                    str(self._chunk_tokens),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=sink,
                    env=child_environment(),
                    process_group=0,  # a terminal's signals are for the service, which drains
                )
        except OSError as error:
            return f"it could not be started ({error.strerror})"
        if self._closing.is_set():
            process.terminate()
        silent = await self._listen(process)
        if silent:
            self._signal(asyncio.subprocess.Process.kill)
        code = await process.wait()
        return silent or f"it ended with {code} (its log: {LOG_FILE})"

    async def _listen(self, process: asyncio.subprocess.Process) -> str:
        """Reads the server's messages until it ends. Returns the reason to end it, or an empty text if it has ended."""
        assert process.stdout is not None
        limit_s = START_S
        while True:
            try:
                line = await asyncio.wait_for(process.stdout.readline(), limit_s)
                if not line:
                    return ""
                held = json.loads(line)
                self._held = {name: int(held[name]) for name in ("used_bytes", "size_bytes", "chunks")}
            except TimeoutError:
                return f"it has been silent for {limit_s:g} s"
            except (ValueError, KeyError, TypeError):
                return "its message is no report of its contents"
            limit_s = SILENCE_S

    def _signal(self, send: Callable[[asyncio.subprocess.Process], None]) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                send(self._process)

    def _sink(self) -> BinaryIO:
        with self._storage.tidying(RUN_FOLDER):
            folder = self._run_folder / "logs"
            folder.mkdir(parents=True, exist_ok=True)
            return (folder / LOG_FILE).open("ab")
        return open(os.devnull, "ab")
