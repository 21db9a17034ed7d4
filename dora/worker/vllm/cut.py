"""Cuts the blocks of one of vLLM's requests, so that it continues from an earlier token."""

from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import MambaManager


def cut_blocks(cache: Any, request_id: str, kv_tokens: int) -> int:
    """Frees the blocks of a request after its first ``kv_tokens`` tokens, in each group. Returns the tokens whose KV
    stays, or 0, and changes nothing, if a window has left some behind. A group that keeps a state is left as it is.

    Later tokens are written to the last block. It is freed too if others hold it, and leaves the prefix cache if not.
    ``cache`` is vLLM's KVCacheManager, whose other groups all have blocks of one size.
    """
    managers, pool = cache.coordinator.single_type_managers, cache.block_pool
    managers = [manager for manager in managers if not isinstance(manager, MambaManager)]
    block_size: int = managers[0].block_size
    lists = [manager.req_to_blocks[request_id] for manager in managers]
    full, rest = divmod(kv_tokens, block_size)
    if rest and any(blocks[full].ref_cnt > 1 for blocks in lists):
        kv_tokens, rest = full * block_size, 0
    end = full + (rest > 0)
    firsts = [manager.get_num_skipped_tokens(kv_tokens) // block_size for manager in managers]
    if any(block.is_null for blocks, first in zip(lists, firsts, strict=True) for block in blocks[first:end]):
        return 0
    for manager, blocks in zip(managers, lists, strict=True):
        pool.free_blocks(reversed(blocks[end:]))
        del blocks[end:]
        if rest:
            pool.evict_blocks({blocks[full].block_id})
        manager.num_cached_block[request_id] = min(manager.num_cached_block.get(request_id, 0), full)
    return kv_tokens
