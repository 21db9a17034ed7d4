"""The environments of other projects' clients, which ``make clients`` installs, and programs that run there."""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.snippets import ROOT


def python_of(name: str) -> Path:
    """Returns the interpreter of ``.venv-NAME``, or skips the test with the reason."""
    folder = ROOT / f".venv-{name}"
    if not (folder / "setup.stamp").is_file():
        made_by = name if name == "ray" else "clients"
        pytest.skip(f"there is no {folder.name}: `make {made_by}` installs it")
    return folder / "bin" / "python"


async def run_in(
    name: str,
    program: Path,
    *arguments: str,
    variables: Mapping[str, str] | None = None,
    has_dora: bool = False,
) -> str:
    """Runs a program in a client's environment. Returns what it wrote; fails if it does. ``has_dora``: it imports DORA,
    of this checkout, and the examples.
    """
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples")])} if has_dora else {}
    environment |= {**(variables or {}), **path}
    process = await asyncio.create_subprocess_exec(
        python_of(name),
        *(() if has_dora else ("-I",)),
        program,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, err.decode(errors="replace")[-4000:]
    return out.decode()
