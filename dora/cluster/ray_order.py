"""What a run's actors on Ray are told, and the commands that they run. Needs no Ray."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

SERVICE: Final = "service"
HOST: Final = "host"
REJOIN_S: Final = 30  # then a host asks anew where the service is


class State(StrEnum):
    """The state of a part. It is silent while its node does not answer, draining if its node is to go, and released
    until it has drained and ended.
    """

    PENDING = "pending"
    STARTING = "starting"
    RUNNING = "running"
    SILENT = "silent"
    DRAINING = "draining"
    RELEASED = "released"
    ENDED = "ended"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Order:
    """``run`` is the namespace of its actors. ``token``: the owner's for the service, the role's for a host.

    ``folder`` and ``config``, the text of the run's file, are for the service alone.
    """

    name: str
    run: str
    version: str
    token: str = field(repr=False)
    workers: int
    gpus: int
    port: int
    folder: str
    working_folder: str
    config: str = field(repr=False)

    @property
    def part(self) -> str:
        return part_of(self.name)


def part_of(name: str) -> str:
    return SERVICE if name == SERVICE else HOST


def command_of(order: Order, address: str) -> list[str]:
    """Returns the arguments of ``dora`` for a part. ``address`` is the service's."""
    if order.part == SERVICE:
        folder = order.folder
        return ["serve", "--config", f"{folder}/run.toml", "--state", f"{folder}/state", "--listen", address, "--json"]
    device = "cuda" if order.gpus else "cpu"
    command = ["host", "--join", address, "--name", order.name, "--device", device, "--rejoin-s", str(REJOIN_S)]
    return command if order.workers < 0 else [*command, "--workers", str(order.workers)]
