"""The needs of engines on GPUs from their host: driver, compiler, shared memory, and GPUs that nobody else uses.

``read_host`` reads a machine; every check is a pure function of what was read.
"""

import os
import re
import resource
import shutil
import subprocess
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from dora.errors import InvalidValue
from dora.host.placement import Gpu
from dora.system.environment import without_secrets

DRIVER_LEAST: Final = 580  # of CUDA 13: NVIDIA, CUDA Toolkit Release Notes, minimum driver versions
DRIVER_FILE: Final = Path("/proc/driver/nvidia/version")
SHARED: Final = "/dev/shm"
SHARED_LEAST_BYTES: Final = 1 << 30  # a container's default of 64 MB holds no version
SMI_S: Final = 20.0
_DRIVER: Final = re.compile(r"Kernel Module(?:\s+for\s+\S+)?\s+(\d+(?:\.\d+)+)")
_ESCAPE: Final = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class HostReading:
    """The readings of a host. ``processes`` and ``topology`` are outputs of nvidia-smi, empty without it."""

    driver: str  # the text of /proc/driver/nvidia/version
    compiler: str  # empty: none
    header: str  # the path of Python.h; empty: there is none
    mounts: str  # the text of /proc/mounts
    shared_bytes: int  # the size of /dev/shm
    lockable_bytes: int  # by RLIMIT_MEMLOCK; -1: no limit
    processes: str
    topology: str


def read_host() -> HostReading:
    """Reads this machine. Takes up to seconds, for nvidia-smi."""
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    room = os.statvfs(SHARED) if os.path.isdir(SHARED) else None
    return HostReading(
        driver=_text(DRIVER_FILE),
        compiler=os.environ.get("CC") or shutil.which("clang") or shutil.which("gcc") or "",  # triton, runtime/build.py
        header=str(header) if header.is_file() else "",
        mounts=_text(Path("/proc/mounts")),
        shared_bytes=room.f_blocks * room.f_frsize if room else 0,
        lockable_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        processes=_smi("--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv,noheader,nounits"),
        topology=_smi("topo", "-m"),
    )


def driver_number(text: str) -> str:
    """Returns the driver's number, such as 580.65.06, or an empty text."""
    match = _DRIVER.search(text)
    return match[1] if match else ""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    gpu: str  # UUID
    pid: int
    name: str
    memory_mib: str

    def __str__(self) -> str:
        return f"{self.gpu} is in use by {self.name} (process {self.pid}, {self.memory_mib} MiB)"


def processes_of(text: str) -> Iterator[GpuProcess]:
    """Yields the processes in nvidia-smi's list."""
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) >= 4 and parts[1].isdigit():
            yield GpuProcess(parts[0], int(parts[1]), ", ".join(parts[2:-1]), parts[-1])


def links_of(text: str) -> dict[tuple[int, int], str]:
    """Returns the link of each pair of GPUs by nvidia-smi's matrix, such as NV18 for 18 NVLinks, or a way over PCIe."""
    rows = [_ESCAPE.sub("", line).split() for line in text.splitlines()]
    count = sum(name.startswith("GPU") and name[3:].isdigit() for name in rows[0]) if rows else 0
    return {
        (int(row[0][3:]), other): row[1 + other]
        for row in rows[1:]
        if row and row[0].startswith("GPU") and row[0][3:].isdigit()
        for other in range(int(row[0][3:]) + 1, min(count, len(row) - 1))
    }


def troubles(read: HostReading, gpus: Sequence[Gpu], ours: Collection[int] = ()) -> list[str]:
    """Returns sentences on what keeps engines from a start on these GPUs. ``ours`` and descendants may use them."""
    found, number = [], driver_number(read.driver)
    if number and int(number.partition(".")[0]) < DRIVER_LEAST:
        found.append(f"a driver of {DRIVER_LEAST} or newer, which CUDA 13 needs; this one is {number}")
    if not read.compiler:
        found.append("a C compiler, with which Triton builds what starts its kernels: install gcc, or set CC")
    if not read.header:
        found.append("Python.h, which Triton's compiler includes: install Python's headers (python3-dev)")
    if not any(line.split()[1:3] == [SHARED, "tmpfs"] for line in read.mounts.splitlines()):
        found.append(f"a tmpfs at {SHARED}, for weights and KV")
    elif read.shared_bytes < SHARED_LEAST_BYTES:
        found.append(f"a larger {SHARED} than {read.shared_bytes:,} bytes (docker run --shm-size, or --ipc=host)")
    uuids = {gpu.uuid for gpu in gpus}
    taken = [
        each
        for each in processes_of(read.processes)
        if each.gpu in uuids and not {each.pid, *_ancestors(each.pid)} & {*ours}
    ]
    return found + [f"GPUs that no other process uses: {each}" for each in taken]


def check_host(
    gpus: Sequence[Gpu], device: str, ours: Collection[int] = (), field: str = "workers.device"
) -> HostReading | None:
    """Returns the readings of a host of GPUs, or None without GPUs. Raises InvalidValue with the first trouble."""
    if not gpus:
        return None
    read = read_host()
    for trouble in troubles(read, gpus, ours):
        raise InvalidValue(field, device, f"cuda on a host with {trouble}")
    return read


def _ancestors(pid: int) -> set[int]:
    with suppress(psutil.Error):
        return {parent.pid for parent in psutil.Process(pid).parents()}
    return set()


def _smi(*arguments: str) -> str:
    with suppress(OSError, subprocess.TimeoutExpired):
        argv = ["nvidia-smi", *arguments]
        done = subprocess.run(
            argv,
            env=without_secrets(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SMI_S,
            check=False,
        )
        return "" if done.returncode else done.stdout
    return ""


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
