"""``python -m tests.prometheus.fetch FOLDER``: fetches Prometheus and promtool from Debian's package, once.

Does nothing if both are on the PATH. Exits with 1 and apt's reason if they cannot be had.
"""

import shutil
import sys
from pathlib import Path
from typing import Final

from tests.debian import fetch

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = ROOT / ".prometheus-build"
PACKAGE: Final = "prometheus"
TOOLS: Final = ("prometheus", "promtool")


def tool(name: str, folder: Path = FOLDER) -> Path | None:
    """Returns a tool of the PATH or of the folder; None: there is none."""
    fetched = folder / "usr" / "bin" / name
    found = shutil.which(name) or (fetched if fetched.is_file() else None)
    return None if found is None else Path(found)


def main(folder: Path) -> None:
    if all(tool(name, folder) for name in TOOLS):
        return
    fetch((PACKAGE,), folder, "Prometheus")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
