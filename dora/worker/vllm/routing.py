"""Records the experts of each token beside its KV: one additional layer for each layer with experts.

    forward pass ── capture(layer, ids) ──▶ the token's slot in "model.layers.3.mlp.experts.routed"
    end of step  ── rows of fed tokens ───▶ reports
    prefix hit, migration, parking, KV tier: the blocks travel like those of any layer

A row is written together with its token's KV, so whoever has the KV of a prompt, from the prefix cache or from
elsewhere, also has the rows. The block of such a layer is (ids, tokens), with ids padded to ``IDS_MULTIPLE``. Tensor
parallelism, whose ranks all route alike, gives each shard some of the ids as it gives it some KV heads, so rows fit
engines with other ranks and block sizes by the rules of KV.

vLLM's own capture (``enable_return_routed_experts``) requires its second model runner, which has no CPU support, and no
pipeline parallelism. This module uses its hook in the routers (vllm 0.32, ``fused_moe/routed_experts_capturer.py``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

from dora.data.types import RoutingShape
from dora.worker.vllm.blocks import LayerBlocks, shareable
from dora.worker.vllm.groups import whole_group

IDS_MULTIPLE: Final = 8  # of the ids in a block: 1, 2, 4 or 8 shards have equal parts
_SUFFIX: Final = ".routed"


@dataclass(frozen=True, slots=True)
class RoutedLayers:
    """The rows of one rank, in memory that its engine's process can map."""

    descriptor: int
    size_bytes: int
    layers: tuple[LayerBlocks, ...]  # in the model's order
    found: tuple[tuple[int, int], ...]  # top_k and experts of each


def bind(model: torch.nn.Module, kv_cache_config: Any, shape: RoutingShape, shard: int, shards: int) -> RoutedLayers:
    """Starts recording in this rank's layers. Raises ValueError if vLLM has no hook for their routers."""
    runners = sorted((each for each in model.modules() if isinstance(each, MoERunner)), key=lambda each: each.layer_id)
    group_id, group = whole_group(kv_cache_config)
    if group is None or not group.layers:
        raise ValueError("no layer of this rank keeps the KV of all tokens")
    if padded_ids(shape) % shards:
        raise ValueError(f"{shards} shards do not divide rows of {padded_ids(shape)} ids")
    if not runners:  # a pipeline's stage without experts
        return RoutedLayers(-1, 0, (), ())
    held_ids, blocks = padded_ids(shape) // shards, kv_cache_config.num_blocks
    layer_bytes = blocks * held_ids * group.block_tokens * shape.id_bytes
    descriptor, memory = shareable(layer_bytes * len(runners))
    dtype = torch.uint8 if shape.id_bytes == 1 else torch.int16  # the same bits as uint16 for ids below 32,768
    tables = torch.frombuffer(memory, dtype=dtype).view(len(runners), blocks, held_ids, group.block_tokens)
    by_layer = {runner.layer_id: table for runner, table in zip(runners, tables, strict=True)}
    bind_routed_experts_capturer(model, _Capturer(by_layer, group.layers[0], group.block_tokens, shard, shape))
    interior = held_ids, ((1, shape.id_bytes),)
    row = layer_bytes // blocks
    layers = tuple(
        LayerBlocks(f"{runner.layer_name}{_SUFFIX}", group_id, 0, interior, (at * layer_bytes, row, row))
        for at, runner in enumerate(runners)
    )
    found = tuple((int(runner.router.top_k), int(runner.router.global_num_experts)) for runner in runners)
    return RoutedLayers(descriptor, len(memory), layers, found)


def padded_ids(shape: RoutingShape) -> int:
    """Returns the ids in a row of one layer's block, of all shards together."""
    return -(-shape.top_k // IDS_MULTIPLE) * IDS_MULTIPLE


class _Capturer:
    """The object that vLLM's routers call in a forward pass, in place of vLLM's capturer."""

    def __init__(
        self,
        tables: Mapping[int, torch.Tensor],
        attention_layer: str,
        block_tokens: int,
        shard: int,
        shape: RoutingShape,
    ) -> None:
        """``tables`` has (blocks, ids of this shard, tokens) of each layer."""
        self._tables = tables
        self._attention_layer = attention_layer  # its slots are those of the rows
        self._block_tokens = block_tokens
        held_ids = next(iter(tables.values())).shape[1]
        self._ids = slice(shard * held_ids, min((shard + 1) * held_ids, shape.top_k))  # may be none
        self._context: Any = None
        self._places: tuple[torch.Tensor, torch.Tensor] | None = None

    def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        """``topk_ids`` has the shape (tokens of this step, top_k). Raises RuntimeError for another number of tokens."""
        context = get_forward_context()
        if context is not self._context:
            slots = context.slot_mapping[self._attention_layer]
            slots = slots[: int((slots >= 0).sum())]  # padding, at the end, has no slot
            self._context, self._places = context, (slots // self._block_tokens, slots % self._block_tokens)
        assert self._places is not None
        blocks, offsets = self._places
        if len(topk_ids) < len(blocks):
            raise RuntimeError(f"layer {layer_id} routed {len(topk_ids)} of {len(blocks)} tokens")
        ids = topk_ids[: len(blocks), self._ids]
        table = self._tables[layer_id]
        table[blocks, : ids.shape[1], offsets] = ids.to(table.dtype)


class Fed(NamedTuple):
    """Tokens of one request, at positions ``first`` to ``end``, that were fed to sample a step's tokens."""

    name: str
    block_ids: Sequence[int]
    first: int
    end: int


class RoutingRows:
    """In the engine's process: reads rows from the memory of its ranks."""

    def __init__(
        self, shape: RoutingShape, group: int, block_tokens: int, stages: Sequence[Sequence[np.ndarray]]
    ) -> None:
        """``stages`` has the shards of each pipeline stage with experts, as (layers, blocks, ids, tokens)."""
        self.group = group  # the group whose block ids apply
        self._shape = shape
        self._block_tokens = block_tokens
        self._stages = stages

    def of(self, fed: Sequence[Fed]) -> dict[str, bytes]:
        """Returns rows by request, as ``TokenDelta.routed_experts`` has them."""
        if not fed:
            return {}
        positions = [np.arange(each.first, each.end) for each in fed]
        blocks = np.concatenate([self._blocks_of(each, at) for each, at in zip(fed, positions, strict=True)])
        offsets = np.concatenate(positions) % self._block_tokens
        parts = [
            np.concatenate([held[:, blocks, :, offsets] for held in shards], axis=2)[..., : self._shape.top_k]
            for shards in self._stages
        ]
        rows = np.concatenate(parts, axis=1)
        ends = np.cumsum([len(at) for at in positions])
        return {each.name: part.tobytes() for each, part in zip(fed, np.split(rows, ends[:-1]), strict=True)}

    def _blocks_of(self, fed: Fed, positions: np.ndarray) -> np.ndarray:
        first, end = fed.first // self._block_tokens, -(-fed.end // self._block_tokens)
        return np.asarray(fed.block_ids[first:end])[positions // self._block_tokens - first]
