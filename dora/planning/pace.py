"""How long a layout takes for a training step, compared with others: what it computes and sends, and where it waits.

Operations over FLOP/s and bytes over bandwidth, each over one efficiency. Good for comparing layouts and for nothing
else: how long a step takes is measured (allocation.py). Left out: communication that hides behind computing,
interleaved pipelines, uneven experts, and that long responses attend to more than the mean.
"""

from dataclasses import dataclass, replace
from math import ceil
from typing import Final

from dora.planning.drain import MICRO_BATCHES
from dora.planning.hardware import LAYER_S, NODE_GPUS, PREFILL_EFFICIENCY, Hardware
from dora.planning.layout import WEIGHT_AND_GRADIENT_BYTES, Replica, Stage, stage_parameters, stages
from dora.planning.models import VALUE_BYTES, ModelSpec
from dora.planning.workload import StepWorkload

LINK_EFFICIENCY: Final = 0.75  # of a link's or a network's bandwidth, in collective operations: assumed
PASSES: Final = 4  # over a token, in forward passes: old policy's logprobs 1, forward 1, backward 2
EXCHANGES: Final = 3  # of a layer's activations between ranks, each time in the same way: in each of those once
UPDATES: Final = MICRO_BATCHES  # of the weights in a step, after each of which replicas exchange gradients
_ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Batch:
    """What one update trains on."""

    tokens: float
    longest_tokens: int  # of a response with its prompt: one replica has all of it
    context_tokens: float  # that a token attends to, on average


def batch_of(workload: StepWorkload) -> Batch:
    """An update's share of the step."""
    tokens = workload.n_tokens + workload.responses * workload.prompt_tokens
    longest = workload.cap_tokens + ceil(workload.prompt_tokens)
    return Batch(tokens / UPDATES, longest, workload.c_tokens / workload.n_tokens)


@dataclass(frozen=True, slots=True)
class Pace:
    """The slowest stage of one replica.

    Of one token: ``token_s`` to compute, ``send_token_s`` to exchange with ranks of the replica, ``pass_on_bytes`` to
    other stages. Of a micro-batch: ``launch_s``, which computing cannot be shorter than. Of an update: ``dense_bytes``
    and ``expert_bytes`` of gradients and weights, which ranks exchange that hold the same ones.
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
        """Seconds of a step on ``data`` replicas; not a whole number: as if that could be.

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


def pace(model: ModelSpec, hardware: Hardware, batch: Batch, replica: Replica, even: bool = False) -> Pace:
    """``even``: as if layers could be cut anywhere, so that all stages compute as much."""
    parts = stages(model, replica.pipeline)
    forward_flop = max(_forward_flop(model, batch, stage) for stage in parts)
    fullest, again = parts[0], int(replica.recompute)
    if even:
        fullest = replace(fullest, layers=model.layers / replica.pipeline)
        whole = Stage(model.layers, embeddings=2, in_flight=1, logits=True)
        forward_flop = min(forward_flop, _forward_flop(model, batch, whole) / replica.pipeline)
    token_flop = forward_flop * (PASSES + again)
    ranks = replica.tensor * replica.context
    dense, experts = stage_parameters(model, fullest)
    sent_s = _layer_send_s(model, hardware, replica) * fullest.layers
    return Pace(
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


def _forward_flop(model: ModelSpec, batch: Batch, stage: Stage) -> float:
    """Of one token in one stage: two a weight, and for each token that it attends to its score and its share."""
    values = model.heads * (model.head_dim + (model.value_dim or model.head_dim))
    layer_flop = 2 * model.layer_active_parameters + 2 * values * batch.context_tokens
    return stage.layers * layer_flop + (2 * model.embedding_parameters if stage.logits else 0)


def _layer_send_s(model: ModelSpec, hardware: Hardware, replica: Replica) -> float:
    """Of one token in one layer: what ranks of one replica, and those that share experts, exchange of activations.

    Tensor parallelism gathers the sequence before attention and before a dense network, and scatters it behind them
    (Korthikanti et al., section 4.2.2). Context parallelism passes keys and values round, and their gradients. Expert
    parallelism sends a token to its experts and back.
    """
    tensor, context, expert = replica.tensor, replica.context, replica.expert
    exchanges = EXCHANGES + int(replica.recompute)
    hidden_bytes = VALUE_BYTES * model.hidden_dim
    gathered = 4 if model.ffn_dim else 2
    tensor_bytes = exchanges * gathered * hidden_bytes * (1 - 1 / tensor) / context
    kv_bytes = VALUE_BYTES * model.kv_heads * (model.head_dim + (model.value_dim or model.head_dim))
    context_bytes = (exchanges + 1) * kv_bytes / tensor * (1 - 1 / context)
    sent = 2 * model.experts_per_token / model.block_layers
    expert_bytes = exchanges * sent * hidden_bytes * (1 - 1 / expert) / (tensor * context)
    return (
        tensor_bytes / _bandwidth(hardware, tensor)
        + context_bytes / _bandwidth(hardware, tensor * context)
        + expert_bytes / _bandwidth(hardware, expert)
    )


def _bandwidth(hardware: Hardware, ranks: float) -> float:
    """Of one accelerator, in bytes a second, to the others of so many that stand beside each other."""
    near = ranks <= NODE_GPUS
    return LINK_EFFICIENCY * (hardware.link_bytes_per_s if near else hardware.network_bytes_per_s)
