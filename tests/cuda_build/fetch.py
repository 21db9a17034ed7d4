"""``python -m tests.cuda_build.fetch FOLDER``: fetches vLLM's CUDA build and Triton into a folder, once.

``FOLDER/vllm`` has the build's sources without its compiled objects, ``FOLDER/triton`` all of Triton.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]


def pin_of(package: str) -> str:
    """Returns a package's line in the lock for GPUs."""
    lines = (ROOT / "locks" / "cuda.txt").read_text().splitlines()
    (pin,) = (line for line in lines if line.startswith(f"{package}=="))
    return pin


def download(pin: str, folder: Path) -> Path:
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", folder, pin], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def unpack(wheel: Path, folder: Path, *, compiled: bool) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if compiled or not (name.endswith((".so", ".cubin")) or ".so." in name):
                archive.extract(name, folder)


def main(folder: Path) -> None:
    for name in ("vllm", "triton"):
        pin = pin_of(name)
        stamp = folder / name / "pin"
        if stamp.is_file() and stamp.read_text() == pin:
            continue
        print(f"fetching {pin} ...", file=sys.stderr)
        with tempfile.TemporaryDirectory() as temporary:
            unpack(download(pin, Path(temporary)), folder / name, compiled=name == "triton")
        stamp.write_text(pin)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
