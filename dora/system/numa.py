"""Binding of a process to the CPUs and the memory of NUMA nodes.

A host states a worker's binding in its environment; the worker applies it before it loads an engine, so its threads and
ranks inherit it. Memory is preferred from the nodes, not bound to them: a node without free memory would otherwise end
the worker.
"""

import ctypes
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

CPUS: Final = "DORA_CPUS"
MEMORY_NODES: Final = "DORA_MEMORY_NODES"
_SET_MEMPOLICY: Final = {"x86_64": 238, "aarch64": 237}  # asm/unistd.h
_PREFERRED, _PREFERRED_MANY = 1, 5  # linux/mempolicy.h
_NODES_MAX: Final = 1024


class Allowed(NamedTuple):
    """The CPUs and memory nodes that this process may use, by its affinity and its cpuset."""

    cpus: frozenset[int]
    nodes: frozenset[int]


class Locality(NamedTuple):
    """The NUMA node of a PCI device, -1 if it is unknown, and the CPUs next to it."""

    node: int = -1
    cpus: frozenset[int] = frozenset()


NOTHING: Final = Allowed(frozenset(), frozenset())
UNKNOWN: Final = Locality()


@dataclass(frozen=True, slots=True)
class Binding:
    """CPUs and memory nodes of a process. Without any it is not bound, and ``why`` says the reason."""

    cpus: frozenset[int] = frozenset()
    nodes: frozenset[int] = frozenset()
    why: str = ""

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which ``bind`` finds it."""
        return {CPUS: written(self.cpus), MEMORY_NODES: written(self.nodes)} if self.cpus else {}


def locality_of(device: Path) -> Locality:
    """Returns the locality of a PCI device by its folder in /sys/bus/pci/devices."""
    try:
        node, cpus = int((device / "numa_node").read_text()), numbers((device / "local_cpulist").read_text())
    except (OSError, ValueError):
        return UNKNOWN
    return Locality(node, cpus)


def inherited(status: Path = Path("/proc/self/status")) -> Allowed:
    """Returns what this process may use. An unreadable ``status`` allows no memory node."""
    nodes: frozenset[int] = frozenset()
    try:
        for line in status.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "Mems_allowed_list":
                nodes = numbers(value)
    except (OSError, ValueError):
        pass
    return Allowed(frozenset(os.sched_getaffinity(0)), nodes)


def binding_of(places: Sequence[Locality], may_use: Allowed) -> Binding:
    """Returns the binding of a process beside devices at ``places``. Processes at one place share all its CPUs."""
    if not places or any(place.node < 0 or not place.cpus for place in places):
        return Binding(why="the system does not say to which NUMA node the device belongs")
    if not all(place.cpus & may_use.cpus for place in places):
        nodes = written({place.node for place in places if not place.cpus & may_use.cpus})
        return Binding(why=f"this process may use no CPU of NUMA node {nodes}, to which the device belongs")
    cpus = frozenset().union(*(place.cpus for place in places)) & may_use.cpus
    return Binding(cpus, frozenset(place.node for place in places) & may_use.nodes)


def bind(environment: Mapping[str, str] = os.environ) -> str:
    """Binds this process as its environment states. Returns a line for its log, empty if nothing is stated.

    Failures leave it unbound: it works from everywhere, only slower.
    """
    if not environment.get(CPUS):
        return ""
    try:
        cpus, nodes = numbers(environment[CPUS]), numbers(environment.get(MEMORY_NODES, ""))
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), cpus)
        if nodes:
            _prefer(nodes)
    except (OSError, ValueError) as error:
        return f"not bound to CPUs {environment[CPUS]}: {error}"
    memory = f", memory preferred from NUMA node {written(nodes)}" if nodes else ""
    return f"bound to CPUs {written(cpus)}{memory}"


def _prefer(nodes: Iterable[int]) -> None:
    """Prefers memory of these nodes (set_mempolicy(2)). Raises OSError."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return
    bits, chosen = 8 * ctypes.sizeof(ctypes.c_ulong), sorted(nodes)
    mask = (ctypes.c_ulong * (_NODES_MAX // bits))()
    for node in chosen:
        mask[node // bits] |= 1 << node % bits
    libc = ctypes.CDLL(None, use_errno=True)
    mode = _PREFERRED if len(chosen) == 1 else _PREFERRED_MANY
    if libc.syscall(number, mode, mask, ctypes.c_ulong(_NODES_MAX + 1)):
        error = ctypes.get_errno()
        raise OSError(error, f"set_mempolicy: {os.strerror(error)}")


def numbers(text: str) -> frozenset[int]:
    """Reads a list as the kernel writes it: ``0-3,8``. Raises ValueError."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, dash, last = part.partition("-")
            found.update(range(int(first), int(last if dash else first) + 1))
    return frozenset(found)


def written(found: Iterable[int]) -> str:
    """Writes numbers as the kernel does."""
    runs: list[list[int]] = []
    for number in sorted(found):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)
