"""Fetches programs from Debian's packages, without installing them."""

import subprocess
import sys
import tempfile
from pathlib import Path


def fetch(packages: tuple[str, ...], folder: Path, name: str) -> None:
    """Unpacks packages into ``folder``. Exits with 1 and apt's reason if ``name`` cannot be had."""
    print(f"fetching Debian's {' and '.join(packages)} ...", file=sys.stderr)
    with tempfile.TemporaryDirectory() as temporary:
        try:
            subprocess.run(["apt-get", "download", "--quiet=2", *packages], cwd=temporary, check=True)
            for package in Path(temporary).glob("*.deb"):
                subprocess.run(["dpkg-deb", "--extract", package, folder], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            sys.exit(f"{name} cannot be had: {error}")
