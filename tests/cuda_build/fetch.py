"""``python -m tests.cuda_build.fetch FOLDER [PACKAGE ...]``: fetches vLLM's CUDA build and Triton into a folder, once.

``FOLDER/vllm`` has the build's sources without its compiled objects, ``FOLDER/triton`` what its interpreter needs. The
versions are those of locks/cuda.txt. Exits with 1 and pip's reason if one cannot be had.
"""

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("vllm", "triton")
PIP: Final = (*(sys.executable, "-m", "pip", "download"), *("--quiet", "--retries", "1", "--no-deps"))
# Of Triton, without a GPU: tools that assemble, profile and extend kernels.
_TOOLS: Final = (
    "backends/nvidia/bin",
    "backends/nvidia/lib",
    "instrumentation",
    "plugins",
    "FileCheck",
    "_C/libproton",
)
UNUSED: Final = tuple(f"triton/{name}" for name in _TOOLS)


def pin_of(package: str) -> str:
    """Returns a package's line in the lock for GPUs."""
    lines = (ROOT / "locks" / "cuda.txt").read_text().splitlines()
    (pin,) = (line for line in lines if line.startswith(f"{package}=="))
    return pin


def has(folder: Path, package: str) -> bool:
    """Returns whether the folder has the package in the lock's version."""
    stamp = folder / package / "pin"
    return stamp.is_file() and stamp.read_text() == pin_of(package)


def download(pin: str, folder: Path) -> Path:
    subprocess.run([*PIP, "-d", folder, pin], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def unpack(package: str, wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            is_compiled = name.endswith((".so", ".cubin")) or ".so." in name
            if not name.startswith(UNUSED) and (package == "triton" or not is_compiled):
                archive.extract(name, folder)


def main(folder: Path, packages: Sequence[str]) -> None:
    for package in packages:
        if has(folder, package):
            continue
        pin = pin_of(package)
        print(f"fetching {pin} ...", file=sys.stderr)
        with tempfile.TemporaryDirectory() as temporary:
            try:
                unpack(package, download(pin, Path(temporary)), folder / package)
            except subprocess.CalledProcessError as error:
                sys.exit(f"{pin} cannot be had: pip ended with {error.returncode}")
        (folder / package / "pin").write_text(pin)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or PACKAGES)
