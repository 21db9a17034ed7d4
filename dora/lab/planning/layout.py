"""The layouts in which a trainer divides a model over accelerators, and the memory that each accelerator needs.

The trainer is modelled on Megatron-LM: tensor parallelism with sequence parallelism within a node, a pipeline that
alternates one forward and one backward pass, data parallelism with a distributed optimizer; context and expert
parallelism if needed. Weights are bf16, gradients fp32, Adam's two moments and the master weights fp32 and sharded over
data-parallel ranks: 6 + 12 / d bytes per parameter (Megatron Core's documentation of its distributed optimizer).

Activations are counted as by Korthikanti et al. ("Reducing Activation Recomputation in Large Transformer Models",
section 4), for current layers: a gated network, grouped or latent attention, no dropout. Attention is flash attention,
which recomputes its scores in the backward pass: their selective recomputation. Full recomputation stores only a
layer's input. The first stage of a pipeline stores as many micro-batches as there are stages, the last one stores one.
"""

from dataclasses import dataclass
from math import ceil, floor, inf
from typing import Annotated, Final

from dora.data.hardware import Hardware
from dora.lab.planning.hardware import RESERVE_BYTES
from dora.lab.planning.models import VALUE_BYTES, ModelSpec

TRAINER_SHARE: Final = 0.95  # of the memory: an allocator cannot use all free memory
WEIGHT_AND_GRADIENT_BYTES: Final = 6  # per parameter: bf16 and fp32
OPTIMIZER_BYTES: Final = 12  # per parameter: master weight and two moments, fp32
LOGIT_BYTES: Final = 6  # bf16, and their fp32 softmax for the loss


@dataclass(frozen=True, slots=True, order=True)
class Replica:
    """One copy of the model, and the micro-batches it computes."""

    tensor: Annotated[int, "ranks that share a layer"]
    pipeline: Annotated[int, "stages of layers"]
    context: Annotated[int, "ranks that share one sequence"]
    expert: Annotated[
        int, "ranks, of one replica or several, that share the experts of a layer; they need no additional accelerators"
    ]
    recompute: Annotated[bool, "whether everything in a layer except its input is recomputed for the backward pass"]
    micro_batch_tokens: Annotated[int, "tokens of a micro-batch: one longest response with its prompt, or several"]

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline * self.context


@dataclass(frozen=True, slots=True)
class ReplicaLayout:
    """``data`` replicas, and the memory that the fullest accelerator of one needs."""

    replica: Replica
    data: int
    memory_bytes: float

    @property
    def gpus(self) -> int:
        return self.replica.gpus * self.data


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """One stage of a pipeline. ``embeddings`` counts its own, of input and output. ``logits`` marks the last."""

    layers: float
    embeddings: int
    in_flight: int  # micro-batches whose activations it stores
    logits: bool


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of an accelerator of one stage: the part independent of the replicas, and the part they share."""

    fixed_bytes: float
    shared_bytes: float

    def on(self, data: float) -> float:
        return self.fixed_bytes + self.shared_bytes / data

    def least_data(self, limit_bytes: float) -> float:
        """The minimum number of replicas for which it fits, not rounded; infinite if none is enough."""
        if self.fixed_bytes >= limit_bytes:
            return inf
        return max(1.0, self.shared_bytes / (limit_bytes - self.fixed_bytes))


def limit_bytes(hardware: Hardware) -> float:
    """The memory of one accelerator that a trainer may use."""
    return hardware.memory_bytes * TRAINER_SHARE - RESERVE_BYTES


def stages(model: ModelSpec, pipeline: int) -> tuple[PipelineStage, ...]:
    """The two stages that can be the fullest: the first, and the last, which has the logits; a single stage is both.

    Stages have whole blocks, divided so that no stage computes more than necessary; the last has fewer, to make up for
    its logits.
    """
    if pipeline == 1:
        return (PipelineStage(model.layers, embeddings=model.embeddings, in_flight=1, logits=True),)
    logits = model.embedding_parameters / (model.layer_active_parameters * model.block_layers)

    def weight(last: int) -> float:
        return max(_most(model, pipeline, last), last + logits)

    evenly = max(1, floor((model.blocks + logits) / pipeline - logits))
    last = min((evenly, evenly + 1), key=weight)
    return (
        PipelineStage(
            _most(model, pipeline, last) * model.block_layers, embeddings=1, in_flight=pipeline, logits=False
        ),
        PipelineStage(last * model.block_layers, embeddings=1, in_flight=1, logits=True),
    )


def _most(model: ModelSpec, pipeline: int, last: int) -> int:
    return ceil((model.blocks - last) / (pipeline - 1))


def footprints(model: ModelSpec, replica: Replica) -> tuple[Footprint, ...]:
    return tuple(_footprint(model, replica, stage) for stage in stages(model, replica.pipeline))


def layer_activation_bytes(model: ModelSpec) -> float:
    """Returns bytes that a token stores in a layer for the backward pass, on one accelerator that computes it alone.

    These are the inputs and outputs of both norms (the outputs are inputs of the projections); queries, keys, values
    and attention output; gate, up and their product. Each expert that the token is sent to adds its input, these three,
    and its output.
    """
    experts = model.layer_experts * (2 * model.hidden_dim + 3 * model.expert_dim)
    return VALUE_BYTES * (4 * model.hidden_dim + model.attention_dim + 3 * model.ffn_dim + experts)


def _footprint(model: ModelSpec, replica: Replica, stage: PipelineStage) -> Footprint:
    tokens = replica.micro_batch_tokens / replica.context
    layer_bytes = layer_activation_bytes(model) * tokens / replica.tensor
    input_bytes = VALUE_BYTES * model.hidden_dim * tokens / replica.tensor
    kept_bytes = stage.layers * stage.in_flight * (input_bytes if replica.recompute else layer_bytes)
    # In the backward pass of a layer: its gradients, of about the same size, and its recomputed part. Logits come
    # before.
    work_bytes = layer_bytes * (2 if replica.recompute else 1)
    if stage.logits:
        work_bytes = max(work_bytes, LOGIT_BYTES * model.vocabulary * tokens / replica.tensor)
    dense, experts = stage_parameters(model, stage)
    held = dense / replica.tensor + experts / replica.expert
    return Footprint(
        fixed_bytes=WEIGHT_AND_GRADIENT_BYTES * held + kept_bytes + work_bytes,
        shared_bytes=OPTIMIZER_BYTES * (dense + experts) / (replica.tensor * replica.context),
    )


def stage_parameters(model: ModelSpec, stage: PipelineStage) -> tuple[float, float]:
    """Returns parameters of a stage: those divided by tensor parallelism, and those of the experts."""
    share = stage.layers / model.layers
    layers = model.parameters - model.expert_parameters - model.embeddings * model.embedding_parameters
    return share * layers + stage.embeddings * model.embedding_parameters, share * model.expert_parameters
