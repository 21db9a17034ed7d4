"""The host memory that the versions of a service's weight store take, known before its start."""

import os
from dataclasses import dataclass
from pathlib import Path

from dora.config import Config
from dora.errors import LimitExceeded
from dora.system.files import nearest_existing
from dora.system.memory import is_in_memory, memory_bytes
from dora.weights.host_store import bound_of
from dora.weights.reference import Reference


@dataclass(frozen=True, slots=True)
class VersionMemory:
    """Holds the memory that a weight store's versions may take, and what its folder can ever have."""

    versions: int
    version_bytes: int
    needed_bytes: int  # with the files' headers
    limit_bytes: int  # 0: the folder is on a disk
    folder: Path

    def check(self) -> None:
        """Raises LimitExceeded if the versions can never fit."""
        if 0 < self.limit_bytes < self.needed_bytes:
            fitting = self.limit_bytes * self.versions // self.needed_bytes
            allowed = (
                f"at most {fitting}, by a smaller window.size: versions of {self.version_bytes:,} bytes may take "
                f"{self.needed_bytes:,}, and {self.folder} has {self.limit_bytes:,} bytes of host memory"
            )
            raise LimitExceeded("service.weight_versions", self.versions, allowed)

    def __str__(self) -> str:
        place = f"{gigabytes(self.limit_bytes)} of host memory" if self.limit_bytes else f"{self.folder}, on a disk"
        each, all_of_them = gigabytes(self.version_bytes), gigabytes(self.needed_bytes)
        return f"up to {self.versions} versions of {each}, {all_of_them} with their headers, in {place}"


def gigabytes(size_bytes: int) -> str:
    """Formats a size for people, to three digits."""
    return f"{size_bytes / 1e9:.3g} GB" if size_bytes >= 1e8 else f"{size_bytes / 1e6:.3g} MB"


def version_memory(config: Config, reference: Reference, folder: Path, kept: int = 0) -> VersionMemory:
    """Returns the memory for a store in ``folder``, which need not exist. ``weight_versions`` explains ``kept``."""
    versions = weight_versions(config, kept)
    folder = nearest_existing(folder)
    limit_bytes = 0
    if is_in_memory(folder):
        limit_bytes = min(memory_bytes(), size_of(folder) or memory_bytes())
    return VersionMemory(versions, reference.content_bytes, bound_of(reference, versions), limit_bytes, folder)


def size_of(folder: Path) -> int:
    """Returns the size of a folder's file system, or 0 if it has no limit."""
    room = os.statvfs(folder)
    return room.f_blocks * room.f_frsize


def weight_versions(config: Config, kept: int = 0) -> int:
    """Returns the number of versions that a host's weight store may hold: the window's, the next one, those that
    evaluations pin, the reference, and ``kept`` ones of an earlier incarnation, whose window may have been wider.
    """
    reference = 1 if config.rollout.reference_version else 0
    return config.service.weight_versions or config.live_versions(kept) + reference
