"""KV over NCCL. Needs torch with CUDA and no vLLM; what needs two GPUs is skipped on one."""

import hashlib
import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from dora.kvtransfer.peer import Peer
from dora.kvtransfer.transports.torch_pair import _Stage
from dora.ops.doctor.kv_between import prove
from tests.contract.planes import a_plane

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU"),
]
WAIT_S = 120.0
BODY = np.random.default_rng(0).integers(0, 256, (9 << 20) + 5, np.uint8)


def test_a_stage_brings_bytes_to_the_gpu() -> None:
    stage = _Stage("cuda", 1 << 20)
    stage.host[:] = BODY[: 1 << 20]
    there = stage.on_device(1000)
    assert there.is_cuda and np.array_equal(there.cpu().numpy(), BODY[:1000])


def test_two_workers_of_one_gpu_fall_back(tmp_path: Path) -> None:
    """NCCL has no two ranks on one GPU: it says so, and the next transport takes over."""
    with a_plane(tmp_path, 1, ("nccl", "tcp")) as source, a_plane(tmp_path, 2, ("nccl", "tcp")) as target:
        target.plane.expect("r", 1, BODY.nbytes)
        sent = source.plane.send_parts(target.peer, "r", [BODY.data], b"head").done.result(WAIT_S)
        assert sent.transport == "tcp" and sent.fallbacks[0].startswith("nccl: ")
        assert np.array_equal(target.plane.take_rounds(sent.key)[1][0].body, BODY)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_bytes_arrive_at_another_gpu(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_target, args=(theirs, str(tmp_path)))
    child.start()
    try:
        peer = Peer("w2", 2, ours.recv(), ("nccl",))
        with a_plane(tmp_path, 1, ("nccl",)) as source:
            for _ in range(3):
                sent = source.plane.send_parts(peer, "r", [BODY[:7].data, BODY[7:].data], b"head").done.result(WAIT_S)
                assert (sent.transport, sent.fallbacks) == ("nccl", ())
                ours.send(sent.key)
                assert ours.recv() == hashlib.sha256(BODY).digest()
    finally:
        ours.send("")
        child.join(WAIT_S)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_blocks_go_straight_into_another_gpu(tmp_path: Path) -> None:
    """In both processes no byte of a body is in host memory; then the target is killed."""
    assert prove(tmp_path, "cuda", "nccl")["gb_per_s"] > 0


def _target(parent: Connection, folder: str) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"  # before CUDA starts in this process
    with a_plane(Path(folder), 2, ("nccl",)) as end:
        end.plane.expect("r", 1, BODY.nbytes)
        parent.send(end.address)
        while key := parent.recv():
            body = end.plane.take_rounds(key)[1][0].body
            end.plane.expect("r", 1, BODY.nbytes)
            parent.send(hashlib.sha256(body).digest())
