"""A transformer of two layers with a KV cache, whose keys and values stay those of the weights that computed them."""

from types import SimpleNamespace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

WIDTH: Final = 48
HEADS: Final = 3
LAYERS: Final = 2
SCALE: Final = np.float32((WIDTH // HEADS) ** -0.5)
EPSILON: Final = np.finfo(np.float32).eps  # of RMSNorm

IntColumn = npt.NDArray[np.int64]
FloatRows = npt.NDArray[np.float32]


class Cache:
    """Keys and values of all sessions in flight, by the slot that each has. Float32."""

    def __init__(self, slots: int, tokens: int) -> None:
        shape = (LAYERS, slots, HEADS, tokens, WIDTH // HEADS)
        self.keys, self.values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)


class Layer(nn.Module):
    """Attention and a feed-forward part, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.mix = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """(rows, tokens, WIDTH)."""
        parts = self.qkv(self.read(states)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2)
        query, key, value = parts.chunk(3, dim=1)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        states = states + self.out(attended.transpose(1, 2).flatten(-2))
        return states + self.down(functional.silu(self.up(self.mix(states))))


class Policy(nn.Module):
    """A causal language model in the interface of transformers that the reference learner uses."""

    def __init__(self, vocabulary: int, tokens: int) -> None:
        super().__init__()
        # a kind of layer that the learner does not know, so that it reads whole rows
        self.config = SimpleNamespace(vocab_size=vocabulary, layer_types=("cached",))
        self.tokens, self.places = nn.Embedding(vocabulary, WIDTH), nn.Embedding(tokens, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, use_cache: bool = False
    ) -> SimpleNamespace:
        """(rows, tokens) padded at the right, which causal attention never reads."""
        states = self.tokens(input_ids) + self.places.weight[: input_ids.shape[1]]
        for layer in self.layers:
            states = layer(states)
        return SimpleNamespace(logits=self.head(self.norm(states)))


class Decoder:
    """One version of a policy that reads a token of each session at a time, in numpy: calls of a few microseconds."""

    def __init__(self, policy: Policy) -> None:
        self._weights = {name: each.detach().numpy().copy() for name, each in policy.state_dict().items()}

    def read(self, cache: Cache, slots: IntColumn, ids: IntColumn, places: IntColumn) -> FloatRows:
        """Reads each session's token at its place. Returns the (sessions, vocabulary) logprobs of the next one."""
        weights, count, length = self._weights, len(slots), int(places.max()) + 1
        states = weights["tokens.weight"][ids] + weights["places.weight"][places]
        unseen = (np.arange(length) > places[:, None])[:, None]
        for number in range(LAYERS):
            layer = f"layers.{number}."
            qkv = _normed(states, weights[layer + "read.weight"]) @ weights[layer + "qkv.weight"].T
            query, key, value = qkv.reshape(count, 3, HEADS, -1).swapaxes(0, 1)
            cache.keys[number, slots, :, places], cache.values[number, slots, :, places] = key, value
            scores = (cache.keys[number, slots, :, :length] @ query[..., None])[..., 0] * SCALE
            scores[np.broadcast_to(unseen, scores.shape)] = -np.inf
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            shares /= shares.sum(-1, keepdims=True)
            attended = (shares[:, :, None] @ cache.values[number, slots, :, :length]).reshape(count, WIDTH)
            states = states + attended @ weights[layer + "out.weight"].T
            mixed = _normed(states, weights[layer + "mix.weight"]) @ weights[layer + "up.weight"].T
            states = states + (mixed / (np.float32(1.0) + np.exp(-mixed))) @ weights[layer + "down.weight"].T
        logits = _normed(states, weights["norm.weight"]) @ weights["head.weight"].T
        logits -= logits.max(-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def _normed(states: FloatRows, weight: FloatRows) -> FloatRows:
    return states / np.sqrt((states * states).mean(-1, keepdims=True) + EPSILON) * weight
