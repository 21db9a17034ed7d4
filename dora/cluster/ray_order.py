"""A run on Ray: its settings, its actors' states and orders, and the commands that they run. Needs no Ray."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from pydantic import Field

from dora.cluster.adapter import HOST, SERVICE
from dora.config.section import Section

REJOIN_S: Final = 30  # then a host asks again where the service is

HEAD: Final = "node:__internal_head__"  # a resource of Ray's head node alone


class RayTable(Section):
    folder: str = Field("dora-run", min_length=1, description="token and state; shared, if the service is to move")
    hosts: int = Field(1, ge=0, le=4096, description="at the start")
    cpus: float = Field(1.0, ge=0, le=4096, description="of a node, for a host")
    gpus: int = Field(0, ge=0, le=64, description="of a node, for a host; 0: its workers run on CPUs")
    workers: int = Field(-1, ge=-1, le=256, description="of each host; -1: as the service's own host")
    service: dict[str, float] = Field({HEAD: 0.001}, description="Ray's resources for the service")
    port: int = Field(7070, ge=1, le=65535, description="of the service, on its node")
    address: str = Field("auto", description="of the Ray cluster")


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
    table: RayTable
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
    device = "cuda" if order.table.gpus else "cpu"
    command = ["host", "--join", address, "--name", order.name, "--device", device, "--rejoin-s", str(REJOIN_S)]
    return command if order.table.workers < 0 else [*command, "--workers", str(order.table.workers)]
