"""The interface of a scheduler's adapter."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

SERVICE: Final = "service"
HOST: Final = "host"


@dataclass(frozen=True, slots=True)
class Job:
    """A job of the cluster. ``part``: service or host; ``state`` and ``reason`` in the scheduler's words."""

    name: str
    part: str
    state: str
    machine: str = ""
    reason: str = ""
    host: str = ""  # its name in the service, of a host


class Cluster(Protocol):
    """The jobs of one run. Raises InvalidValue for what the scheduler refuses, with its reason."""

    def planned(self) -> Mapping[str, str]:
        """Returns the scripts or manifests that ``up`` would submit, by file name. A person can submit them by hand."""
        ...

    def up(self, hosts: int | None) -> list[Job]:
        """Starts the service and so many hosts, or as many as the file says. If one is refused, nothing stays."""
        ...

    def jobs(self) -> list[Job]: ...

    def want(self, hosts: int) -> list[Job]:
        """Adds hosts, or releases those that have not begun, then the latest ones. Returns the jobs after that."""
        ...

    def release(self, host: str) -> None:
        """Ends a host's job: its workers drain first, and it does not come again."""
        ...

    def down(self) -> list[str]:
        """Ends all jobs and waits for them. The run's state stays. Returns the names of jobs that had to be killed."""
        ...
