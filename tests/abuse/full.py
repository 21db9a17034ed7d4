"""Real faults of storage, without root: a limit on the size of files, and a small disk of a process's own."""

import asyncio
import json
import resource
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from dora.rpc import dora_pb2 as pb
from tests.unit.test_runtime import Shell, ended


@contextmanager
def files_up_to(size_bytes: int) -> Iterator[None]:
    """Within, no file of this process grows beyond so many bytes: a write fails in its midst, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def full_device() -> FileIO:
    """A file that is always full."""
    return open("/dev/full", "ab", buffering=0)


@dataclass(frozen=True, slots=True)
class Served:
    """A service in a process of its own, with a small disk that no other process sees."""

    process: asyncio.subprocess.Process
    address: str
    token: str
    model: Path
    disk: Path  # as this process reaches it

    def fill(self) -> Path:
        return fill_up(self.disk)


def fill_up(disk: Path) -> Path:
    """Takes all the room that the disk has left, to the last byte. Returns the file that does."""
    filler = disk / "filler"
    with filler.open("ab", buffering=0) as stream:
        piece = bytes(1 << 16)
        while piece:
            try:
                stream.write(piece)
            except OSError:
                piece = piece[: len(piece) // 2]
    return filler


def with_own_disk(argv: list[str], disk: Path, disk_bytes: int) -> list[str]:
    """A command line that runs ``argv`` where ``disk``, a folder, is a file system in memory for it alone."""
    mount = f'mount -t tmpfs -o size={disk_bytes} tmpfs "$0" && exec "$@"'
    return ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, str(disk), *argv]


@asynccontextmanager
async def served(model: Path, disk: Path, disk_bytes: int, **settings: object) -> AsyncIterator[Served]:
    """``dora serve`` with fake engines, and ``disk`` a file system of so many bytes in memory (0: a plain folder).

    No root is needed: the process has namespaces of its own, where the kernel allows it. Ends it by SIGTERM.
    """
    argv = [sys.executable, "-m", "dora", "serve", "--json", "--listen", "127.0.0.1:0", "--model", str(model)]
    defaults = {
        "workers.engine": "fake",
        "workers.count": 1,
        "workers.max_model_len_tokens": 256,
        "service.tick_s": 0.1,
        "kv.pool_mb": 0,
    }
    chosen = {**defaults, "rollout.max_tokens": 24, "rollout.group_size": 2, "workers.kv_tokens": 4096, **settings}
    argv += ["--prompts", "tiny", *(part for name, value in chosen.items() for part in ("--set", f"{name}={value}"))]
    await asyncio.to_thread(disk.mkdir, exist_ok=True)
    if disk_bytes:
        argv = with_own_disk(argv, disk, disk_bytes)
    process = await asyncio.create_subprocess_exec(
        *argv, stdout=asyncio.subprocess.PIPE, stderr=(disk.parent / "service.log").open("ab")
    )
    try:
        assert process.stdout is not None
        told = json.loads(await process.stdout.readuntil(b"\n}\n"))
        seen = Path(f"/proc/{process.pid}/root{disk}") if disk_bytes else disk
        yield Served(process, told["address"], told["token"], model, seen)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def has_namespaces() -> bool:
    """Whether this user may have a mount of its own here."""
    argv = ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    try:
        return subprocess.run(argv, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


# ------------------------------------------------------------------------------------------- a shell without processes


def record_of(shell: Shell) -> Path:
    return shell.store.root.parent / "record"


def lines_of(shell: Shell, name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (record_of(shell) / name).read_text().splitlines()]


FILLING = 8  # trajectories


async def fill(shell: Shell) -> None:
    """Step 0 waits for its commit. Its trajectories take more room than the store's notes on a version."""
    request_ids = await shell.admit(1, group_size=FILLING, pairs=64)
    stream = shell.trainer.StreamStep(pb.StreamStepRequest(trainer_epoch=1, step=0), None)
    shell.report(*map(ended, request_ids))
    async for _ in stream:
        pass


def faults(shell: Shell) -> dict[str, str]:
    return {fault.place: fault.reason for fault in shell.runtime.storage.faults.values()}


async def looking(shell: Shell, call: "asyncio.Future[pb.CommitStepReply]") -> pb.CommitStepReply:
    """Returns the result of the call, while the service checks its storage again and again."""
    while not call.done():
        await shell.runtime.look_at_storage()
    return await call
