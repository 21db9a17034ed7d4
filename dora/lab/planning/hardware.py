"""Accelerators by name, and a roofline model of an engine's cost (StaleFlow eq. 5-11, appendix B).

Each coefficient is bytes over bandwidth or operations over FLOP/s, divided by an efficiency. The efficiencies are
calibrated on one point, Qwen2.5-32B on four H800 (k1 3.26e-8, k2 6.5 ms, k3 47 us, k4 20 ms, 24K prefilled tokens/s,
772K KV tokens), and used for everything else.

Checked against StaleFlow's Table 4 (Qwen3-30B-A3B on one H20; the paper does not state the number of GPUs, one fits k2
and k3 best): k1 -44%, k2 (what one request reads) +28%, k3 +1%. k4's second constant is taken from that table, so its
agreement proves nothing. Whole steps, by this model and by the table: 64 requests of 5,000 tokens 43.8 and 42.0 ms, 128
of 2,000 41.5 and 45.3 ms, 256 of 2,000 64.1 and 80.0 ms, but 16 of 5,000 27.4 and 18.5 ms: Table 4 reads no more
weights for sixteen requests than for one, whose tokens touch 64% of the experts. Its own mean error is stated as 10.5%.

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

from dora.config import CostConfig
from dora.errors import InvalidValue, one_of
from dora.lab.planning.experts import fullest_rank
from dora.lab.planning.models import ModelSpec

KV_EFFICIENCY: Final = 0.600  # of the memory bandwidth, reading KV
WEIGHTS_EFFICIENCY: Final = 0.752  # of the memory bandwidth, reading weights
DECODE_EFFICIENCY: Final = 0.352  # of the FLOP/s, one token per request
PREFILL_EFFICIENCY: Final = 0.397  # of the FLOP/s, many tokens per request
LAYER_S: Final = 223e-6  # each layer's launches and small operations: 10.7 ms over 48 layers, StaleFlow Table 4
LAYER_REDUCE_S: Final = 89.5e-6  # each layer's reductions over several accelerators: the rest of 20 ms over 64 layers
MEMORY_SHARE: Final = 0.9  # of the memory, for an engine
RESERVE_BYTES: Final = 5.0e9  # an accelerator's activations, graphs and communication buffers
NODE_GPUS: Final = 8  # accelerators joined by the links of one node


@dataclass(frozen=True, slots=True)
class Hardware:
    """One kind of accelerator, by the figures of its data sheet."""

    name: str
    memory_bytes: float
    bandwidth_bytes_per_s: float
    flops: float  # bf16, dense, per second
    link_bytes_per_s: float  # to the others of its node, in one direction
    network_bytes_per_s: float  # to those of other nodes, in one direction


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
        Hardware("npu-60gb", 60e9, 1.6e12, 350e12, 196e9, 25e9),
        Hardware("a100-80gb", 80e9, 2.039e12, 312e12, 300e9, 25e9),
        Hardware("h100", 80e9, 3.35e12, 989.4e12, 450e9, 50e9),
        Hardware("h200", 141e9, 4.8e12, 989.4e12, 450e9, 50e9),
        Hardware("b200", 180e9, 7.7e12, 2250e12, 900e9, 50e9),
        Hardware("mi300x", 192e9, 5.3e12, 1307.4e12, 448e9, 50e9),
    )
}


def find_hardware(name: str, option: str = "--hardware") -> Hardware:
    """The accelerator of that name, ignoring case. Raises InvalidValue for ``option``, with the nearest name."""
    found = HARDWARE.get(name.lower())
    if found is None:
        raise InvalidValue(option, name, one_of(name, HARDWARE))
    return found


def coefficients(model: ModelSpec, hardware: Hardware, gpus: int) -> CostConfig:
    """The cost of one engine on ``gpus`` accelerators, with its weights and KV split evenly between them.

    The experts of a mixture are spread over all of them (expert parallelism); only the computation of experts is
    uneven.
    """
    bandwidth, flops = hardware.bandwidth_bytes_per_s * gpus, hardware.flops * gpus
    token_flop = 2 * model.active_parameters
    return CostConfig(
        kv_token_s=model.kv_token_bytes / (bandwidth * KV_EFFICIENCY),
        weights_s=model.weights_bytes / (bandwidth * WEIGHTS_EFFICIENCY),
        request_s=token_flop / (flops * DECODE_EFFICIENCY),
        step_s=model.layers * (LAYER_S + (LAYER_REDUCE_S if gpus > 1 else 0.0)),
        prefill_token_s=token_flop / (flops * PREFILL_EFFICIENCY),
        expert_fraction=model.expert_fraction,
        shared_fraction=model.shared_fraction,
        imbalance=model.chosen_share * fullest_rank(gpus, model.experts_per_token),
    )


def kv_tokens(model: ModelSpec, hardware: Hardware, gpus: int) -> int:
    """The KV capacity in tokens of an engine on ``gpus`` accelerators; 0 if the weights leave no room."""
    free_bytes = (hardware.memory_bytes * MEMORY_SHARE - RESERVE_BYTES) * gpus - model.weights_bytes
    return max(0, int(free_bytes / model.kv_token_bytes))
