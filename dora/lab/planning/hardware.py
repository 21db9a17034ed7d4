"""A roofline model of an engine's cost (StaleFlow eq. 5-11, appendix B).

Each coefficient is bytes over bandwidth or operations over FLOP/s, divided by an efficiency. The efficiencies are
calibrated on one point, Qwen2.5-32B on four H800 (k1 3.26e-8, k2 6.5 ms, k3 47 us, k4 20 ms, 24K prefilled tokens/s,
772K KV tokens), and used for everything else.

Checked against StaleFlow's Table 4 (Qwen3-30B-A3B on one H20; the paper does not state the number of GPUs, one fits k2
and k3 best): k1 -44%, k2 (what one request reads) +28%, k3 +1%. k4's second constant is taken from that table, so its
agreement proves nothing. Whole steps, by this model and by the table: 64 requests of 5,000 tokens 43.8 and 42.0 ms, 128
of 2,000 41.5 and 45.3 ms, 256 of 2,000 64.1 and 80.0 ms, but 16 of 5,000 27.4 and 18.5 ms: Table 4 reads no more
weights for sixteen requests than for one, whose tokens touch 64% of the experts. Its own mean error is stated as 10.5%.
"""

from typing import Final

from dora.config import CostConfig
from dora.data.hardware import Hardware
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
        state_s=2 * model.state_bytes / (bandwidth * KV_EFFICIENCY),  # read and written
        prefill_token_s=token_flop / (flops * PREFILL_EFFICIENCY),
        expert_fraction=model.expert_fraction,
        shared_fraction=model.shared_fraction,
        imbalance=model.chosen_share * fullest_rank(gpus, model.experts_per_token),
    )


def kv_tokens(model: ModelSpec, hardware: Hardware, gpus: int, slots: int = 0) -> int:
    """The KV capacity in tokens of an engine on ``gpus`` accelerators; 0 if the weights, and the states of ``slots``
    requests, leave no room.
    """
    taken_bytes = model.weights_bytes + slots * model.state_bytes
    free_bytes = (hardware.memory_bytes * MEMORY_SHARE - RESERVE_BYTES) * gpus - taken_bytes
    return max(0, int(free_bytes / model.kv_token_bytes))
