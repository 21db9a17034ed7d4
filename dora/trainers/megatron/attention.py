"""Support for packs (:mod:`dora.trainers.packing`) in GPTModel: attention within spans, and matching positions.

A pack's responses attend to their prompt and themselves. Megatron passes its attention mask to the attention of each
layer, also when activations are recomputed. In this module that tensor is a table of spans, on the CPU:

    (k, 4), int64: first and last + 1 position of the context, first and last + 1 position of the span's own tokens

Under context parallelism each rank has T / cp consecutive positions, and gathers the keys and values of the others.
Source: *The Llama 3 Herd of Models*, section 3.3.2, context parallelism by all-gather.
"""

from functools import lru_cache
from typing import Any

import torch

from dora.trainers.packing import Pack


def spans_of(pack: Pack, tokens: int) -> torch.Tensor:
    """The table of ``pack``, padded to ``tokens`` positions; the padding is a span of its own."""
    rows = []
    for block in pack.blocks:
        prompt = (block.prompt.start, block.prompt.stop)
        rows.append((0, 0, *prompt))
        rows.extend((*prompt, own.start, own.stop) for own in block.responses)
    end = pack.input_ids.shape[1]
    if tokens > end:
        rows.append((0, 0, end, tokens))
    return torch.tensor(rows, dtype=torch.int64)


class PackedAttention(torch.nn.Module):
    """Replaces Megatron's core attention of a layer: softmax(q k / sqrt(size)) v within each span, by SDPA."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        self._scale = softmax_scale
        self._cp_group = pg_collection.cp

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor,
        *,
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Maps (positions, 1, heads, size), with fewer heads of keys and values, to (positions, 1, heads * size)."""
        places, ranks = query.shape[0], self._cp_group.size()
        first = self._cp_group.rank() * places
        if ranks > 1:
            from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

            key, value = (gather_from_sequence_parallel_region(each, group=self._cp_group) for each in (key, value))
        queries, keys, values = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        parts = []
        for context_start, context_stop, own_start, own_stop in attention_mask.tolist():
            start, stop = max(own_start, first), min(own_stop, first + places)
            if start >= stop:
                continue
            of_span = [self._of_span(each, context_start, context_stop, own_start, stop) for each in (keys, values)]
            seen = _seen(stop - start, of_span[0].shape[2], query.device)
            parts.append(
                torch.nn.functional.scaled_dot_product_attention(
                    queries[:, :, start - first : stop - first],
                    *of_span,
                    attn_mask=seen,
                    is_causal=seen is None,
                    scale=self._scale,
                    enable_gqa=queries.shape[1] != keys.shape[1],
                )
            )
        return torch.cat(parts, dim=2).permute(2, 0, 1, 3).flatten(2)

    @staticmethod
    def _of_span(whole: torch.Tensor, context_start: int, context_stop: int, start: int, stop: int) -> torch.Tensor:
        own = whole[:, :, start:stop]
        if context_start == context_stop:
            return own
        return torch.cat([whole[:, :, context_start:context_stop], own], dim=2)


@lru_cache(maxsize=16)
def _seen(queries: int, keys: int, device: torch.device) -> torch.Tensor | None:
    """Marks the keys, (queries, keys), that the last ``queries`` of ``keys`` tokens attend to, or None if causal."""
    if queries == keys:
        return None
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


class PackedRotary(torch.nn.Module):
    """Megatron's rotary embedding at the positions of a pack, rather than from 0 on.

    ``positions`` (tokens,), of this rank's part of the pack, is set before each forward pass.
    """

    def __init__(self, rotary: Any) -> None:
        super().__init__()
        self._rotary = rotary
        self.positions = torch.zeros(1, dtype=torch.int64)

    def get_rotary_seq_len(self, *arguments: Any) -> int:
        return 0

    def forward(self, length: int, **others: Any) -> torch.Tensor:
        """Returns (positions, 1, 1, size)."""
        return self._rotary.get_emb(int(self.positions.max()) + 1)[self.positions]
