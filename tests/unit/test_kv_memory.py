"""The allocation of a rank's KV-cache (``vllm.blocks.KvMemory``)."""

import os

import numpy as np
import pytest

from dora.worker.vllm.blocks import KvMemory, mapped

torch = pytest.importorskip("torch")


def test_kv_in_host_memory_can_be_mapped_and_kv_on_a_device_stays_there() -> None:
    """vLLM asks for both with the same call (vllm/v1/worker/utils.py, ``allocate_kv_cache``)."""
    with KvMemory() as memory:
        there = torch.zeros(64, dtype=torch.int8, device=torch.device("meta"))
        assert there.device.type == "meta" and memory.descriptor < 0
        there = torch.zeros(64, dtype=torch.int8, device="meta")
        assert there.device.type == "meta" and memory.descriptor < 0
        here = torch.zeros(64, dtype=torch.int8, device=torch.device("cpu"))
        another = torch.zeros(64, dtype=torch.int8)
    here[3] = 7
    shared = mapped(os.getpid(), memory.descriptor, memory.size_bytes)
    assert np.flatnonzero(shared).tolist() == [3] and int(another.sum()) == 0
    os.close(memory.descriptor)
