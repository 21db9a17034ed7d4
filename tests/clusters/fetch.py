"""``python -m tests.clusters.fetch``: fetches from Debian's packages, once, what tests of ``dora cluster`` need: Slurm
(6 MB) into ``.slurm-build``, bubblewrap (80 KB) into ``.pods-build``.

Exits with 1 and apt's reason if it cannot be had.
"""

from pathlib import Path
from typing import Final

from tests.debian import fetch

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = ROOT / ".slurm-build"
PODS: Final = ROOT / ".pods-build"
API: Final = ROOT / ".kubernetes-build" / "bin"
PACKAGES: Final = ("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "libmunge2", "libhwloc15")


def main() -> None:
    if not (PODS / "usr/bin/bwrap").is_file():
        fetch(("bubblewrap",), PODS, "bubblewrap")
    if not (FOLDER / "usr/sbin/slurmd-wlm").is_file():
        fetch(PACKAGES, FOLDER, "Slurm")


if __name__ == "__main__":
    main()
