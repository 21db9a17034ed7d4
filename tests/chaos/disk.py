"""The small disk on which the service keeps its state, to be filled up."""

import subprocess
from pathlib import Path

from tests.abuse.full import fill_up


class Disk:
    """A file system in memory that outlives the processes that use it, in a mount namespace of its own."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        folder.mkdir(parents=True)
        mount = f'mount -t tmpfs -o size={size_bytes} tmpfs "$0" && echo mounted && exec cat'
        argv = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, str(folder)]
        self._holder = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"mounted\n"
        self.inside = [
            "nsenter",
            "--user",
            "--preserve-credentials",
            "--mount",
            f"--target={self._holder.pid}",
            f"--wd={Path.cwd()}",
        ]
        self.seen = Path(f"/proc/{self._holder.pid}/root{folder}")
        self._filler: Path | None = None

    def fill(self) -> None:
        self._filler = fill_up(self.seen)

    def free(self) -> None:
        if self._filler is not None:
            self._filler.unlink()
            self._filler = None

    def close(self) -> None:
        self._holder.communicate(b"")
