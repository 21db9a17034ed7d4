"""Language models by name: the properties that determine the size of weights, KV cache and activations."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from dora.errors import InvalidValue, one_of

VALUE_BYTES: Final = 2  # bf16, weights and KV alike


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One architecture: layers of attention and a gated feed-forward network, experts in its place or beside it.

    Grouped-query attention: ``kv_heads`` of ``head_dim``. Latent attention stores ``latent_dim`` values of a token and
    computes keys of ``head_dim`` and values of ``value_dim`` for each of its heads.
    """

    name: str
    parameters: float  # total
    active_parameters: float  # used by one token; equal to ``parameters`` for a dense model
    layers: int  # with attention, or a state in its place
    hidden_dim: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    ffn_dim: int = 0  # of the dense feed-forward network beside each attention, the mean over layers; 0: none
    kv_layers: int = 0  # layers that have KV, where the others keep a state; 0: all
    state_bytes: int = 0  # of a request, in those others
    value_dim: int = 0  # 0: as ``head_dim``
    latent_dim: int = 0  # values per layer that latent attention stores of one token
    experts: int = 0  # that a token can choose from in one block; 0: a dense model
    experts_per_token: float = 0  # chosen by a token in one block, on average
    expert_dim: int = 0
    block_layers: int = 1  # attention layers in a block, which a pipeline does not split
    dense_blocks: int = 0  # blocks of a mixture that have no experts
    tied: bool = False  # whether the output embedding is the input embedding

    @property
    def weights_bytes(self) -> float:
        return self.parameters * VALUE_BYTES

    @property
    def kv_token_bytes(self) -> int:
        """KV of one token over all layers."""
        return (self.kv_layers or self.layers) * (self.latent_dim or 2 * self.kv_heads * self.head_dim) * VALUE_BYTES

    @property
    def expert_fraction(self) -> float:
        """Share of the experts that one token chooses; 1 for a dense model."""
        return self.experts_per_token / self.experts if self.experts else 1.0

    @property
    def shared_fraction(self) -> float:
        """The share of the weights that every token uses, regardless of its experts; with those it makes up the active
        weights. 0 for a dense model, which counts as one expert that all tokens choose.
        """
        if not self.experts:
            return 0.0
        return (self.active_parameters / self.parameters - self.expert_fraction) / (1.0 - self.expert_fraction)

    @property
    def chosen_share(self) -> float:
        """The share of the chosen experts in the weights that one token uses; 0 for a dense model."""
        return 1.0 - self.shared_fraction * self.parameters / self.active_parameters if self.experts else 0.0

    @property
    def blocks(self) -> int:
        return self.layers // self.block_layers

    @property
    def attention_dim(self) -> int:
        """The total size of one token's queries, keys, values and attention output in a layer."""
        return (self.heads + self.kv_heads) * (self.head_dim + (self.value_dim or self.head_dim))

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the input embedding; an output embedding of its own has as many."""
        return self.vocabulary * self.hidden_dim

    @property
    def embeddings(self) -> int:
        """The embeddings of input and output: one if they are tied, else two."""
        return 1 if self.tied else 2

    @property
    def layer_active_parameters(self) -> float:
        return (self.active_parameters - self.embeddings * self.embedding_parameters) / self.layers

    @property
    def expert_parameters(self) -> int:
        return (self.blocks - self.dense_blocks) * self.experts * 3 * self.hidden_dim * self.expert_dim

    @property
    def layer_experts(self) -> float:
        """Experts that a token chooses, per attention layer: the mean over all of them."""
        return self.experts_per_token * (self.blocks - self.dense_blocks) / self.layers


# Layers and heads are from StreamRL's table 2, except for the 7B model: its published configuration has 4 KV heads, the
# table prints 8. Everything else of the Qwen models is from their published configurations, as is the whole 14B model,
# which StaleFlow names without its sizes. LongCat-Flash, as published: 28 blocks of two latent attentions (512 + 64
# values; heads of 128 + 64, values of 128), two dense networks and 512 experts each. A token chooses 12 of these and of
# 256 that do nothing; 8 of the 12 compute on average. 18.6 to 31.3 billion parameters are active, with 0 to 12 of them.
MODELS: Final[Mapping[str, ModelSpec]] = {
    model.name: model
    for model in (
        ModelSpec("qwen2.5-7b", 7.62e9, 7.62e9, 28, 3584, 28, 4, 128, 152_064, ffn_dim=18_944),
        ModelSpec("qwen2.5-14b", 14.77e9, 14.77e9, 48, 5120, 40, 8, 128, 152_064, ffn_dim=13_824),
        ModelSpec("qwen2.5-32b", 32.76e9, 32.76e9, 64, 5120, 40, 8, 128, 152_064, ffn_dim=27_648),
        ModelSpec("qwen2.5-72b", 72.7e9, 72.7e9, 80, 8192, 64, 8, 128, 152_064, ffn_dim=29_568),
        ModelSpec(
            "qwen3-30b-a3b",
            30.5e9,
            3.3e9,
            48,
            2048,
            32,
            4,
            128,
            151_936,
            experts=128,
            experts_per_token=8,
            expert_dim=768,
        ),
        ModelSpec(
            "qwen3-next-80b-a3b",
            79.67e9,
            3.87e9,
            48,
            2048,
            16,
            2,
            256,
            151_936,
            ffn_dim=512,
            kv_layers=12,
            state_bytes=36 * (32 * 128 * 128 + 3 * (2 * 16 + 32) * 128) * VALUE_BYTES,
            experts=512,
            experts_per_token=10,
            expert_dim=512,
        ),
        ModelSpec(
            "longcat-flash",
            560e9,
            27e9,
            56,
            6144,
            64,
            64,
            192,
            131_072,
            ffn_dim=12_288,
            value_dim=128,
            latent_dim=576,
            experts=512,
            experts_per_token=8,
            expert_dim=2048,
            block_layers=2,
        ),
    )
}


def find_model(name: str) -> ModelSpec:
    """The model of that name, ignoring case. Raises InvalidValue with the nearest name."""
    found = MODELS.get(name.lower())
    if found is None:
        raise InvalidValue("--model", name, f"{one_of(name, MODELS)}, or a model's folder or config.json")
    return found
