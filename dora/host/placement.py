"""The GPUs of a host's workers: which exist, which this process may use, and which each worker gets.

One function serves the service's own host and the agents of joined hosts. GPUs are named by UUID, which no numbering
changes; their order is that of the PCI bus. A worker is bound to the CPUs and memory next to its GPUs.
"""

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dora.errors import InvalidValue
from dora.system.numa import NOTHING, UNKNOWN, Allowed, Binding, Locality, binding_of, inherited, locality_of

log = logging.getLogger("dora.service")

GPUS_FOLDER: Final = Path("/proc/driver/nvidia/gpus")
PCI_FOLDER: Final = Path("/sys/bus/pci/devices")
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
ORDER: Final = "CUDA_DEVICE_ORDER"
_FIELD: Final = r"^{}:\s*(.+?)\s*$"


@dataclass(frozen=True, slots=True)
class Gpu:
    model: str
    uuid: str
    pci: str  # 0000:17:00.0
    place: Locality = UNKNOWN


@dataclass(frozen=True, slots=True)
class Placement:
    """The GPUs that a host's workers share out. Without any, they run on CPUs. ``all_gpus`` includes a trainer's.

    ``may_use`` has the CPUs and memory nodes that workers inherit.
    """

    gpus: tuple[Gpu, ...] = ()
    all_gpus: tuple[Gpu, ...] = ()
    may_use: Allowed = NOTHING

    @property
    def kind(self) -> str:
        """The kind of device of each worker: cpu or cuda."""
        return "cuda" if self.gpus else "cpu"

    def workers_max(self, ranks: int) -> int | None:
        """Returns how many workers of ``ranks`` ranks have a GPU for each rank, or None for no limit."""
        return len(self.gpus) // ranks if self.gpus else None

    def check(self, workers: int, ranks: int) -> None:
        """Raises InvalidValue if ``workers`` workers of ``ranks`` ranks need more GPUs than there are."""
        most = self.workers_max(ranks)
        if most is not None and workers > most:
            kept = len(self.all_gpus) - len(self.gpus)
            beside = f" beside {kept} kept for a trainer" if kept else ""
            each = "1 GPU" if ranks == 1 else f"{ranks} GPUs"
            allowed = f"at most {most}: each worker takes {each} of one host, and this has {len(self.gpus)}{beside}"
            raise InvalidValue("workers", workers, allowed)

    def environment(self, number: int, ranks: int, *, shows_trainers: bool = False) -> dict[str, str]:
        """Returns the environment that gives worker ``number`` its GPUs, and the CPUs and memory next to them.

        With ``shows_trainers``, it sees the GPUs kept for a trainer too, after its own, whose numbers stay. Raises
        InvalidValue as ``check`` does.
        """
        if not self.gpus:
            return {VISIBLE: ""}
        self.check(number + 1, ranks)
        own = self.gpus[number * ranks : (number + 1) * ranks]
        shown = (*own, *self.for_trainer) if shows_trainers else own
        visible = {VISIBLE: ",".join(gpu.uuid for gpu in shown), ORDER: "PCI_BUS_ID"}
        return {**visible, **self._binding(own).environment}

    @property
    def for_trainer(self) -> tuple[Gpu, ...]:
        """The GPUs that no worker gets."""
        return self.all_gpus[len(self.gpus) :]

    def why_unbound(self) -> str:
        """Returns which GPUs' workers are not bound to CPUs, and why. It is empty if all are, or there are no GPUs."""
        reasons: dict[str, list[str]] = {}
        for gpu in self.gpus:
            reasons.setdefault(self._binding([gpu]).why, []).append(gpu.pci)
        return "; ".join(f"{', '.join(found)}: {why}" for why, found in reasons.items() if why)

    def _binding(self, own: Sequence[Gpu]) -> Binding:
        return binding_of([gpu.place for gpu in own], self.may_use)


def gpus(folder: Path = GPUS_FOLDER, devices: Path = PCI_FOLDER) -> tuple[Gpu, ...]:
    """Returns the NVIDIA GPUs of this machine in the order of the PCI bus. ``devices`` is the bus in /sys."""
    try:
        texts = {
            each.name: (each / "information").read_text(encoding="utf-8", errors="replace")
            for each in sorted(folder.iterdir())
        }
    except OSError:
        return ()
    return tuple(
        Gpu(_field("Model", text) or "GPU", _field("GPU UUID", text) or pci, pci, locality_of(devices / pci.lower()))
        for pci, text in texts.items()
    )


def visible(found: Sequence[Gpu], environment: Mapping[str, str] = os.environ) -> tuple[Gpu, ...]:
    """Returns the GPUs that an inherited CUDA_VISIBLE_DEVICES leaves, in its order, as a container or Slurm sets it.

    Raises InvalidValue for an entry that names no GPU.
    """
    visible = environment.get(VISIBLE)
    if visible is None:
        return tuple(found)
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return tuple(_named(found, name, VISIBLE, visible) for name in names)


def placement_of(
    device: str,
    *,
    for_trainer: int = 0,
    found: Sequence[Gpu] | None = None,
    environment: Mapping[str, str] = os.environ,
    field: str = "workers.device",
    may_use: Allowed | None = None,
) -> Placement:
    """Returns the placement that ``device`` asks for: ``cpu``; ``cuda``, all GPUs that this process may use; ``cuda:``
    with numbers among these, or UUIDs; if empty, GPUs if there are any.

    No worker gets the ``for_trainer`` GPUs at the end of the list. ``may_use`` is by default what this process may use.
    Raises InvalidValue for other texts, for GPUs that are not there, and for a trainer's GPUs that leave none for
    workers or would be none, as on the CPU.
    """
    there = visible(gpus() if found is None else found, environment)
    kind, _, named = device.partition(":")
    if device not in ("", "cpu") and (kind != "cuda" or device.endswith(":")):
        raise InvalidValue(field, device, "cpu, cuda, or cuda: with GPUs by number or UUID, such as cuda:0,1")
    trainers = "--gpus-for-trainer" if field.startswith("--") else "workers.gpus_for_trainer"
    if device == "cpu" or not (device or there):
        if for_trainer:
            raise InvalidValue(
                trainers, for_trainer, f"0, because workers run on the CPU ({field} = {device or 'cpu'})"
            )
        return Placement()
    if not there:
        raise InvalidValue(field, device, "cpu: this process sees no GPU")
    chosen = tuple(_named(there, name, field, device) for name in named.split(",")) if named else there
    if len(set(chosen)) < len(chosen):
        raise InvalidValue(field, device, "each GPU once")
    if for_trainer >= len(chosen):
        allowed = f"at most {len(chosen) - 1}: there are {len(chosen)} GPUs, and a worker needs one"
        raise InvalidValue(trainers, for_trainer, allowed)
    return Placement(chosen[: len(chosen) - for_trainer], chosen, may_use or inherited())


def log_unbound(placement: Placement) -> None:
    """Logs why workers are not bound to CPUs. A host calls it once."""
    if reasons := placement.why_unbound():
        log.info("workers of these GPUs are not bound to CPUs: %s", reasons)


def _named(found: Sequence[Gpu], name: str, field: str, value: str) -> Gpu:
    if name.isdigit() and int(name) < len(found):
        return found[int(name)]
    matching = [gpu for gpu in found if name.startswith("GPU-") and gpu.uuid.startswith(name)]
    if len(matching) != 1:
        listed = ", ".join(f"{number} ({gpu.uuid})" for number, gpu in enumerate(found)) or "none"
        raise InvalidValue(field, value, f"GPUs of this machine; {name!r} is not one of: {listed}")
    return matching[0]


def _field(name: str, text: str) -> str:
    match = re.search(_FIELD.format(re.escape(name)), text, re.MULTILINE)
    return match.group(1) if match else ""
