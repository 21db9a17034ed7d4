"""Accelerators by name, by the figures of their data sheets.

Figures of single accelerators, dense bf16 FLOP/s, memory and memory bandwidth, from their data sheets; no run on them
calibrates the efficiencies:

    a100-80gb  A100-SXM4-80GB: NVIDIA A100 data sheet
    h100       H100 SXM: NVIDIA H100 data sheet; half of the 1,979 TFLOPS that it states with sparsity
    h200       H200 SXM: NVIDIA H200 data sheet; half of the 1,979 TFLOPS that it states with sparsity
    b200       one GPU of an HGX B200: NVIDIA HGX data sheet, an eighth of the system's figures
    mi300x     MI300X: AMD Instinct MI300X data sheet
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from dora.errors import InvalidValue, one_of


@dataclass(frozen=True, slots=True)
class Hardware:
    """One kind of accelerator, by the figures of its data sheet."""

    name: str
    memory_bytes: float
    bandwidth_bytes_per_s: float
    flops: float  # bf16, dense, per second
    link_bytes_per_s: float  # to the others of its node, in one direction
    network_bytes_per_s: float  # to those of other nodes, in one direction
    bus_bytes_per_s: float = 64e9  # to its host, in one direction: PCIe 5.0 x16


# H20 and H800: StreamRL Table 1, which states links as the sum of both directions. Between nodes 8 x 400 Gbit/s, as in
# DORA (section 5.1) and Laminar (section 8); assumed for H20 too, some of which StreamRL uses for rollout alone, on 100
# Gbit/s per node. For the production cluster's accelerators DORA states only the memory; bandwidths and FLOP/s are
# assumed from parts with 64 GB of that time. The links of the others are half of what their data sheets state for both
# directions: NVLink of 600, 900, 900 and 1,800 GB/s, seven Infinity Fabric links of 128 GB/s. Their networks are
# assumed: 200 Gbit/s per GPU for the A100, 400 for the others.
HARDWARE: Final[Mapping[str, Hardware]] = {
    part.name: part
    for part in (
        Hardware("h800", 80e9, 3.35e12, 989.5e12, 200e9, 50e9),
        Hardware("h20", 96e9, 4.0e12, 148e12, 450e9, 50e9),
        Hardware("npu-60gb", 60e9, 1.6e12, 350e12, 196e9, 25e9, 32e9),
        Hardware("a100-80gb", 80e9, 2.039e12, 312e12, 300e9, 25e9, 32e9),
        Hardware("h100", 80e9, 3.35e12, 989.4e12, 450e9, 50e9),
        Hardware("h200", 141e9, 4.8e12, 989.4e12, 450e9, 50e9),
        Hardware("b200", 180e9, 7.7e12, 2250e12, 900e9, 50e9),
        Hardware("mi300x", 192e9, 5.3e12, 1307.4e12, 448e9, 50e9),
    )
}


def find_hardware(name: str, option: str = "--hardware") -> Hardware:
    """Finds the accelerator of that name, ignoring case. Raises InvalidValue for ``option``, with the nearest name."""
    found = HARDWARE.get(name.lower())
    if found is None:
        raise InvalidValue(option, name, one_of(name, HARDWARE))
    return found


def hardware_of(model: str) -> Hardware | None:
    """Returns the data sheet of a GPU by the name that its driver gives it, such as "NVIDIA H100 80GB HBM3", or None.
    An A100 and an H100 of other sizes or with PCIe have other sheets.
    """
    if model in HARDWARE:
        return HARDWARE[model]
    words = model.lower().replace("-", " ").split()
    named = "a100-80gb" if {"a100", "80gb"} <= {*words} else next((word for word in words if word in HARDWARE), "")
    return None if {"pcie", "nvl"} & {*words} else HARDWARE.get(named)
