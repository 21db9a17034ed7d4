"""``python -m tests.browser.fetch FOLDER``: fetches Chromium from Debian's package, once.

Does nothing if one is on the PATH. Exits with 1 and the reason if it cannot be had: apt's, or the shared libraries that
Chromium lacks on this machine, which ``apt-get install chromium`` brings.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.debian import fetch

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = ROOT / ".chromium-build"
PACKAGES: Final = ("chromium", "chromium-common")
NAMES: Final = ("chromium", "chromium-browser", "google-chrome")
HINT: Final = "`apt-get install chromium` brings all that it needs"


def chromium(folder: Path = FOLDER) -> tuple[Path | None, str]:
    """Returns Chromium, of the PATH or of the folder, and the reason if there is none."""
    if found := next(filter(None, map(shutil.which, NAMES)), None):
        return Path(found), ""
    fetched = folder / "usr" / "lib" / "chromium" / "chromium"
    if not fetched.is_file():
        return None, f"there is no Chromium: `make chromium` fetches it from Debian's package, or {HINT}"
    if lacking := missing_libraries(fetched):
        return None, f"Chromium lacks {', '.join(lacking)}: {HINT}"
    return fetched, ""


def missing_libraries(binary: Path) -> list[str]:
    told = subprocess.run(["ldd", binary], capture_output=True, text=True, check=False).stdout
    return [line.split()[0] for line in told.splitlines() if line.endswith("not found")]


def main(folder: Path) -> None:
    found, _ = chromium(folder)
    if found is None and not (folder / "usr").is_dir():
        fetch(PACKAGES, folder, "Chromium")
    found, reason = chromium(folder)
    if found is None or not os.access(found, os.X_OK):
        sys.exit(f"Chromium cannot be had: {reason}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
