"""Language models by name: what decides the size of their weights and of their KV-cache."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from dora.errors import InvalidValue, one_of

VALUE_BYTES: Final = 2  # bf16, weights and KV alike


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One architecture. Grouped-query attention: ``kv_heads`` of ``head_dim``; latent attention: ``latent_dim``."""

    name: str
    parameters: float  # all of them
    active_parameters: float  # those that one token uses; equal to ``parameters`` for a dense model
    layers: int  # of attention
    kv_heads: int = 0
    head_dim: int = 0
    latent_dim: int = 0  # values a layer that latent attention keeps of one token
    experts: int = 0  # that a token chooses from, in each layer; 0: a dense model
    token_experts: int = 0  # that it chooses, on average

    @property
    def weights_bytes(self) -> float:
        return self.parameters * VALUE_BYTES

    @property
    def kv_token_bytes(self) -> int:
        """KV of one token over all layers."""
        return self.layers * (self.latent_dim or 2 * self.kv_heads * self.head_dim) * VALUE_BYTES

    @property
    def expert_fraction(self) -> float:
        """Share of the experts that one token chooses; 1 for a dense model."""
        return self.token_experts / self.experts if self.experts else 1.0

    @property
    def shared_fraction(self) -> float:
        """Share of the weights that every token uses, whatever it chooses: what with its experts makes up the active
        ones. 0 for a dense model, whose weights are as good as one expert that all choose."""
        if not self.experts:
            return 0.0
        return (self.active_parameters / self.parameters - self.expert_fraction) / (1.0 - self.expert_fraction)

    @property
    def chosen_share(self) -> float:
        """Of the weights that one token uses, the share of the experts that it chose; 0 for a dense model."""
        return 1.0 - self.shared_fraction * self.parameters / self.active_parameters if self.experts else 0.0


# Layers and heads of StreamRL's Table 2 (paper 002), but for the 7B model: its published configuration has 4 KV heads,
# the table prints 8. StaleFlow names the 14B model without its sizes: they are its published configuration's.
# LongCat-Flash: 28 blocks of two latent attentions each, 512 + 64 values; of 512 experts and 256 that compute nothing a
# token chooses 12, so 8 of the 512 on average. Active are 18.6 to 31.3 billion parameters: with none of them, with 12.
# Qwen3-30B-A3B: its published configuration has 128 experts, of which a token chooses 8.
MODELS: Final[Mapping[str, ModelSpec]] = {
    model.name: model
    for model in (
        ModelSpec("qwen2.5-7b", 7.62e9, 7.62e9, layers=28, kv_heads=4, head_dim=128),
        ModelSpec("qwen2.5-14b", 14.77e9, 14.77e9, layers=48, kv_heads=8, head_dim=128),
        ModelSpec("qwen2.5-32b", 32.76e9, 32.76e9, layers=64, kv_heads=8, head_dim=128),
        ModelSpec("qwen2.5-72b", 72.7e9, 72.7e9, layers=80, kv_heads=8, head_dim=128),
        ModelSpec("qwen3-30b-a3b", 30.5e9, 3.3e9, 48, kv_heads=4, head_dim=128, experts=128, token_experts=8),
        ModelSpec("longcat-flash", 560e9, 27e9, layers=56, latent_dim=576, experts=512, token_experts=8),
    )
}


def find_model(name: str) -> ModelSpec:
    """The model of that name, in any case. Raises InvalidValue with the nearest name."""
    found = MODELS.get(name.lower())
    if found is None:
        raise InvalidValue("--model", name, one_of(name, MODELS))
    return found
