"""``python -m tests.cuda_build.fetch FOLDER``: fetches vLLM's CUDA build and Triton into a folder, once.

``FOLDER/vllm`` has the build's sources without its compiled objects, ``FOLDER/triton`` all of Triton.
"""

import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
TRITON: Final = "triton==3.7.0"  # what torch 2.13 asks for on CUDA


def vllm_pin() -> str:
    """Returns the pin of the ``cuda`` extra."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (pin,) = (each for each in extras["cuda"] if each.startswith("vllm=="))
    return str(pin)


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
    for name, pin in (("vllm", vllm_pin()), ("triton", TRITON)):
        stamp = folder / name / "pin"
        if stamp.is_file() and stamp.read_text() == pin:
            continue
        print(f"fetching {pin} ...", file=sys.stderr)
        with tempfile.TemporaryDirectory() as temporary:
            unpack(download(pin, Path(temporary)), folder / name, compiled=name == "triton")
        stamp.write_text(pin)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
