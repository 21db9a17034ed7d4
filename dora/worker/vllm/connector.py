"""Brings external KV into vLLM by its KV connector, in both of its roles.

Whenever a request gets a slot and blocks, vLLM asks the scheduler's half for its external tokens. It queues their
writes, within the step that computes the request's next token, and the scheduler joins them (``join``) before it
returns, so the step's forward pass sees them. Until then a snapshot waits here. Blocks that arrived before the snapshot
are already in the KV-cache. A request with a snapshot takes nothing else; for other requests the shared tier is asked,
if there is one. The runner's half, one in each rank, only tells the place of its KV: messages to it travel between
processes, pickled by vLLM.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from dora.kvtransfer.snapshot import KvSnapshot, Pieces
from dora.worker.reservation import KvStore
from dora.worker.vllm.blocks import KvMemory
from dora.worker.vllm.groups import groups_of
from dora.worker.vllm.tier import TierPrefixes


class _Nothing(KVConnectorMetadata):
    """The empty message of a step to the ranks."""


class SnapshotConnector(KVConnectorBase_V1, SupportsHMA):
    """Named in vLLM's KVTransferConfig. Export needs no connector: unchanging blocks are read directly."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._offered: dict[str, KvSnapshot] = {}
        self.emptied: Sequence[Any] = ()  # vLLM's managers of blocks, with the new ones that their step empties
        self.tier: TierPrefixes | None = None
        self.is_alone = vllm_config.parallel_config.world_size == 1
        self._groups = groups_of(kv_cache_config)
        self.store: KvStore | None = None  # once the engine has started, where its KV-cache can be reached from here
        self.kv_cache_config = kv_cache_config
        self.memory = KvMemory()  # of the runner's half with several ranks
        self.tensors: dict[str, torch.Tensor] = {}  # by layer, in that memory

    # The scheduler's half.

    def offer(self, request_id: str, snapshot: KvSnapshot) -> None:
        """Keeps a snapshot until its request is first scheduled."""
        self._offered[request_id] = snapshot

    def offered(self, request_id: str) -> KvSnapshot | None:
        """Returns the snapshot of a request that was not scheduled yet."""
        return self._offered.get(request_id)

    def is_offered(self, request_id: str) -> bool:
        return request_id in self._offered

    def offered_count(self) -> int:
        return len(self._offered)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        snapshot = self._offered.get(request.request_id)
        if snapshot is not None:
            return snapshot.kv_tokens - num_computed_tokens, False
        if self.tier is not None and not request.skip_reading_prefix_cache:
            return self.tier.found_tokens(request, num_computed_tokens), False
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        snapshot = self._offered.pop(request.request_id, None) if num_external_tokens > 0 else None
        if snapshot is not None:
            ids = zip(self._groups, blocks.get_block_ids(), strict=True)
            chosen = [group.kept(block_ids, snapshot.kv_tokens)[snapshot.ahead :] for group, block_ids in ids]
            self._write(chosen, snapshot.blocks)
        elif self.tier is not None:
            first, found = self.tier.take(request.request_id, num_external_tokens)
            count = sum(len(piece) for piece in next(iter(found.values()), ()))
            if count:  # an engine with a tier has one group
                self._write([blocks.get_block_ids()[0][first : first + count]], found)

    def _write(self, block_ids: list[Sequence[int]], blocks: Mapping[str, Pieces]) -> None:
        assert self.store is not None
        for manager, ids in zip(self.emptied, block_ids, strict=True):
            if manager.new_block_ids:
                manager.new_block_ids = [new for new in manager.new_block_ids if new not in set(ids)]
        self.store.write(block_ids, blocks)

    def join(self) -> None:
        """Makes the forward pass of the step that is being scheduled see all writes so far."""
        assert self.store is not None
        self.store.join()

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return _Nothing()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        self._offered.pop(request.request_id, None)
        if self.tier is not None:
            self.tier.forget(request.request_id)
        return False, None

    # The runner's half.

    def get_mem_pool_context(self) -> KvMemory | None:
        return None if self.is_alone else self.memory

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.tensors = dict(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Does nothing: the scheduler has joined all writes (``join``)."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: writes precede the forward pass on its stream."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing."""

    def wait_for_save(self) -> None:
        """Does nothing."""
