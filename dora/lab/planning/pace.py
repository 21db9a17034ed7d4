"""The relative time of a training step in a layout: computation, communication and pipeline waits.

It is operations over FLOP/s and bytes over bandwidth, each over one efficiency, and serves only to compare layouts: the
time of a step is measured (allocation.py). Not modelled: communication that overlaps with computation, interleaved
pipelines, uneven experts, and the above-average attention cost of long responses.
"""

from dataclasses import dataclass, replace
from math import ceil
from typing import Final

from dora.data.hardware import Hardware
from dora.lab.planning.drain import MICRO_BATCHES
from dora.lab.planning.hardware import LAYER_S, NODE_GPUS, PREFILL_EFFICIENCY
from dora.lab.planning.layout import WEIGHT_AND_GRADIENT_BYTES, PipelineStage, Replica, stage_parameters, stages
from dora.lab.planning.models import VALUE_BYTES, ModelSpec
from dora.lab.planning.workload import StepWorkload

LINK_EFFICIENCY: Final = 0.75  # of a link's or a network's bandwidth, in collective operations: assumed
PASSES: Final = 4  # per token, in units of forward passes: old policy's logprobs 1, forward 1, backward 2
EXCHANGES: Final = 3  # of a layer's activations between ranks: one in each of those three
UPDATES: Final = MICRO_BATCHES  # of the weights per step; after each, replicas exchange gradients
_ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Batch:
    """The training data of one update."""

    tokens: float
    longest_tokens: int  # of a response with its prompt, which one replica processes whole
    context_tokens: float  # attended to by a token, on average


def batch_of(workload: StepWorkload) -> Batch:
    """An update's share of the step."""
    tokens = workload.n_tokens + workload.responses * workload.prompt_tokens
    longest = workload.cap_tokens + ceil(workload.prompt_tokens)
    return Batch(tokens / UPDATES, longest, workload.c_tokens / workload.n_tokens)


@dataclass(frozen=True, slots=True)
class ReplicaPace:
    """The slowest stage of one replica.

    Per token: ``token_s`` to compute, ``send_token_s`` to exchange with ranks of the replica, ``pass_on_bytes`` to
    other stages. Per micro-batch: ``launch_s``, the minimum time of computation. Per update: ``dense_bytes`` and
    ``expert_bytes`` of gradients and weights, exchanged by ranks with the same ones.
    """

    replica: Replica
    batch: Batch
    hardware: Hardware
    token_s: float
    send_token_s: float
    pass_on_bytes: float
    launch_s: float
    dense_bytes: float
    expert_bytes: float

    def step_s(self, data: float) -> float:
        """Seconds of a step on ``data`` replicas, which may be fractional.

        A pipeline of p stages waits for p - 1 of its micro-batches (Narayanan et al., "Efficient Large-Scale Language
        Model Training on GPU Clusters Using Megatron-LM", section 2.2). A replica has its share of the tokens, but no
        less than the longest response.
        """
        replica = self.replica
        tokens = max(self.batch.tokens / data, self.batch.longest_tokens)
        micro_batches = ceil(tokens / replica.micro_batch_tokens - _ROUNDING)
        each = tokens / micro_batches
        send_token_s = self.send_token_s + self.pass_on_bytes / _bandwidth(self.hardware, replica.gpus * data)
        micro_batch_s = max(self.token_s * each, self.launch_s) + send_token_s * each
        copies = replica.context * data  # of dense weights
        expert_copies = max(1.0, replica.tensor * copies / replica.expert)
        reduce_bytes = self.dense_bytes * (1 - 1 / copies) + self.expert_bytes * (1 - 1 / expert_copies)
        reduce_s = reduce_bytes / _bandwidth(self.hardware, replica.tensor * copies)
        return UPDATES * ((micro_batches + replica.pipeline - 1) * micro_batch_s + reduce_s)


def pace(model: ModelSpec, hardware: Hardware, batch: Batch, replica: Replica, even: bool = False) -> ReplicaPace:
    """Computes the pace. ``even`` lets layers be cut anywhere, so that all stages compute equally much."""
    parts = stages(model, replica.pipeline)
    forward_flop = max(_forward_flop(model, batch, stage) for stage in parts)
    fullest, again = parts[0], int(replica.recompute)
    if even:
        fullest = replace(fullest, layers=model.layers / replica.pipeline)
        whole = PipelineStage(model.layers, embeddings=model.embeddings, in_flight=1, logits=True)
        forward_flop = min(forward_flop, _forward_flop(model, batch, whole) / replica.pipeline)
    token_flop = forward_flop * (PASSES + again)
    ranks = replica.tensor * replica.context
    dense, experts = stage_parameters(model, fullest)
    sent_s = _layer_send_s(model, hardware, replica) * fullest.layers
    return ReplicaPace(
        replica=replica,
        batch=batch,
        hardware=hardware,
        token_s=token_flop / (ranks * hardware.flops * PREFILL_EFFICIENCY),
        send_token_s=sent_s,
        pass_on_bytes=EXCHANGES * VALUE_BYTES * model.hidden_dim / ranks if replica.pipeline > 1 else 0.0,
        launch_s=fullest.layers * LAYER_S * (PASSES + again),
        dense_bytes=WEIGHT_AND_GRADIENT_BYTES * dense / replica.tensor,
        expert_bytes=WEIGHT_AND_GRADIENT_BYTES * experts / replica.expert,
    )


def _forward_flop(model: ModelSpec, batch: Batch, stage: PipelineStage) -> float:
    """Operations of one token in one stage: two per weight, and score and value of each token it attends to."""
    values = model.heads * (model.head_dim + (model.value_dim or model.head_dim))
    attending = (model.kv_layers or model.layers) / model.layers
    layer_flop = 2 * model.layer_active_parameters + 2 * values * batch.context_tokens * attending
    return stage.layers * layer_flop + (2 * model.embedding_parameters if stage.logits else 0)


def _layer_send_s(model: ModelSpec, hardware: Hardware, replica: Replica) -> float:
    """Time of one token in one layer to exchange activations between ranks of a replica, or that share experts.

    Tensor parallelism gathers the sequence before attention and before a dense network, and scatters it after them
    (Korthikanti et al., section 4.2.2). Context parallelism passes keys and values around, and their gradients. Expert
    parallelism sends a token to its experts and back.
    """
    tensor, context, expert = replica.tensor, replica.context, replica.expert
    exchanges = EXCHANGES + int(replica.recompute)
    hidden_bytes = VALUE_BYTES * model.hidden_dim
    gathered = 4 if model.ffn_dim else 2
    tensor_bytes = exchanges * gathered * hidden_bytes * (1 - 1 / tensor) / context
    kv_bytes = VALUE_BYTES * model.kv_heads * (model.head_dim + (model.value_dim or model.head_dim))
    context_bytes = (exchanges + 1) * kv_bytes / tensor * (1 - 1 / context)
    sent = 2 * model.layer_experts
    expert_bytes = exchanges * sent * hidden_bytes * (1 - 1 / expert) / (tensor * context)
    return (
        tensor_bytes / _bandwidth(hardware, tensor)
        + context_bytes / _bandwidth(hardware, tensor * context)
        + expert_bytes / _bandwidth(hardware, expert)
    )


def _bandwidth(hardware: Hardware, ranks: float) -> float:
    """Bytes per second of one accelerator to the others of a group of ``ranks`` neighbours."""
    near = ranks <= NODE_GPUS
    return LINK_EFFICIENCY * (hardware.link_bytes_per_s if near else hardware.network_bytes_per_s)
