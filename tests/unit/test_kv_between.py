"""The proof of KV from device to device, run between two processes on CPUs; and what it lifts."""

from pathlib import Path

import pytest
import torch

from dora.host import proof
from dora.kvtransfer.device import is_on_device
from dora.ops.doctor.kv_between import kv_between, prove
from dora.ops.doctor.verdict import Skipped, Subject
from dora.worker.copying.cuda_blocks import DeviceStore
from dora.worker.vllm.device.cuda import Cuda


def test_the_proof_holds_between_two_processes(tmp_path: Path) -> None:
    found = prove(tmp_path, "cpu", "gloo")
    assert found["gb_per_s"] > 0


def test_a_cpu_needs_no_proof(tmp_path: Path) -> None:
    with pytest.raises(Skipped):
        kv_between(Subject("cpu", tmp_path, tmp_path))


def test_kv_leaves_a_gpu_through_host_memory_until_there_is_a_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def store() -> DeviceStore:
        tensors = {"layer.0": torch.zeros(4, 2, 8)}
        found = Cuda().kv_store(dict, lambda: [tensors], {"layer.0": 0}, 4)
        assert isinstance(found, DeviceStore)
        return found

    assert store().device_memory is None
    assert not is_on_device(store().lend([[1]])["layer.0"])
    proof.write_proof("kv", {})
    memory = store().device_memory
    assert memory is not None and memory.kind == "cpu"
    assert is_on_device(store().lend([[1]])["layer.0"])
