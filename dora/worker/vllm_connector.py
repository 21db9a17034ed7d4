"""How KV from outside enters vLLM: its KV connector, in both of its roles.

The scheduler's half is asked, whenever a request gets a slot and blocks, how many tokens come from outside; the
runner's half writes them before the forward pass of that very step. Until then a snapshot waits here, held. What went
ahead of it is in the KV-cache already. A request that has its own snapshot takes nothing else; for others the shared
tier is asked, where there is one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from dora.kvtransfer.snapshot import KvSnapshot, Pieces
from dora.worker.cuda_blocks import DeviceStore
from dora.worker.vllm_blocks import BlockStore
from dora.worker.vllm_groups import groups_of
from dora.worker.vllm_tier import TierPrefixes


@dataclass
class _Import:
    """Blocks to write, and where."""

    block_ids: list[Sequence[int]]  # of each group
    blocks: Mapping[str, Pieces]


@dataclass
class _Imports(KVConnectorMetadata):
    """What one step brings in."""

    imports: list[_Import]


class SnapshotConnector(KVConnectorBase_V1, SupportsHMA):
    """Named in vLLM's KVTransferConfig. Export needs no connector: blocks that do not change are simply read."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._offered: dict[str, KvSnapshot] = {}
        self._imports: list[_Import] = []
        self.tier: TierPrefixes | None = None
        self._block_count: int = kv_cache_config.num_blocks
        self._groups = groups_of(kv_cache_config)
        self._store: BlockStore | DeviceStore | None = None

    # The scheduler's half.

    def offer(self, request_id: str, snapshot: KvSnapshot) -> None:
        """Keeps a snapshot until its request is first scheduled."""
        self._offered[request_id] = snapshot

    def offered(self, request_id: str) -> KvSnapshot | None:
        """The snapshot that still waits for this request to be scheduled."""
        return self._offered.get(request_id)

    def is_offered(self, request_id: str) -> bool:
        return request_id in self._offered

    def offered_count(self) -> int:
        return len(self._offered)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        snapshot = self._offered.get(request.request_id)
        if snapshot is not None:
            return snapshot.kv_tokens - num_computed_tokens, False
        if self.tier is not None:
            return self.tier.found_tokens(request, num_computed_tokens), False
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        snapshot = self._offered.pop(request.request_id, None) if num_external_tokens > 0 else None
        if snapshot is not None:
            ids = zip(self._groups, blocks.get_block_ids(), strict=True)
            chosen = [group.kept(block_ids, snapshot.kv_tokens)[snapshot.ahead :] for group, block_ids in ids]
            self._imports.append(_Import(chosen, snapshot.blocks))
        elif self.tier is not None:
            first, found = self.tier.take(request.request_id, num_external_tokens)
            count = sum(len(piece) for piece in next(iter(found.values()), ()))
            if count:  # an engine with a tier has one group
                self._imports.append(_Import([blocks.get_block_ids()[0][first : first + count]], found))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        imports, self._imports = self._imports, []
        return _Imports(imports)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        self._offered.pop(request.request_id, None)
        if self.tier is not None:
            self.tier.forget(request.request_id)
        return False, None

    # The runner's half.

    @property
    def store(self) -> BlockStore | DeviceStore:
        """The KV-cache; it exists once the engine has started."""
        assert self._store is not None
        return self._store

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if all(tensor.is_cpu for tensor in kv_caches.values()):
            self._store = BlockStore(kv_caches, self._block_count, self._groups)
        else:
            numbers = {name: number for number, group in enumerate(self._groups) for name in group.layers}
            self._store = DeviceStore(kv_caches, numbers, self._block_count)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for entry in self._get_connector_metadata().imports:
            self.store.write(entry.block_ids, entry.blocks)
        self.store.join()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: what ``start_load_kv`` has written comes before the step on its stream."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved on the way."""

    def wait_for_save(self) -> None:
        """Nothing is saved on the way."""
