"""A NIXL whose agents share one process: the calls that DORA makes of ``nixl._api``, checked as UCX checks them.

It writes by memory copies. A write must lie in memory that its agent has registered, as the same kind and device.
"""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Place = tuple[int, int, int]  # address, bytes, device


@dataclass
class Descriptors:
    places: list[Place]
    kind: str


@dataclass
class Agent:
    """``nixl_agent``."""

    name: str
    config: Any = None
    registered: list[Descriptors] = field(default_factory=list)

    def __post_init__(self) -> None:
        AGENTS[self.name] = self

    def register_memory(self, places: list[tuple[int, int, int, str]], kind: str) -> Descriptors:
        self.registered.append(Descriptors([(at, size, device) for at, size, device, _ in places], kind))
        return self.registered[-1]

    def deregister_memory(self, found: Descriptors) -> None:
        self.registered.remove(found)

    def get_partial_agent_metadata(self, found: Descriptors, inc_conn_info: bool, backends: list[str]) -> bytes:
        assert found in self.registered and inc_conn_info and backends == ["UCX"]
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        return metadata

    def get_xfer_descs(self, places: list[Place], kind: str) -> Descriptors:
        return Descriptors(places, kind)

    def initialize_xfer(self, operation: str, here: Descriptors, there: Descriptors, peer: str) -> Any:
        assert operation == "WRITE"
        for agent, wanted in ((self, here), (AGENTS[peer], there)):
            ((at, size, device),) = wanted.places
            if not any(
                known.kind == wanted.kind and place[2] == device and place[0] <= at and at + size <= place[0] + place[1]
                for known in agent.registered
                for place in known.places
            ):
                raise RuntimeError("NIXL_ERR_NOT_FOUND")
        return here.places[0], there.places[0]

    def transfer(self, handle: Any) -> None:
        (source, size, _), (target, _, _) = handle
        ctypes.memmove(target, source, size)

    def check_xfer_state(self, handle: Any) -> str:
        return "DONE"

    def release_xfer_handle(self, handle: Any) -> None:
        pass


AGENTS: dict[str, Agent] = {}


@contextmanager
def installed() -> Iterator[None]:
    """While entered, ``nixl`` is this module."""
    package, api = ModuleType("nixl"), ModuleType("nixl._api")
    package.__spec__ = ModuleSpec("nixl", None, is_package=True)
    package.__path__ = []
    api.nixl_agent = Agent  # type: ignore[attr-defined]
    api.nixl_agent_config = dict  # type: ignore[attr-defined]
    sys.modules |= {"nixl": package, "nixl._api": api}
    try:
        yield
    finally:
        del sys.modules["nixl"], sys.modules["nixl._api"]
        AGENTS.clear()
