"""``python -m tests.clusters.fetch FOLDER``: fetches Slurm from Debian's packages, once (6 MB).

Exits with 1 and apt's reason if it cannot be had.
"""

import sys
from pathlib import Path
from typing import Final

from tests.debian import fetch

FOLDER: Final = Path(__file__).parents[2] / ".slurm-build"
PACKAGES: Final = ("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "libmunge2", "libhwloc15")


def main(folder: Path) -> None:
    if not (folder / "usr/sbin/slurmd-wlm").is_file():
        fetch(PACKAGES, folder, "Slurm")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
