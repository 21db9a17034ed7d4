"""Weights in a trainer's GPU, read by another process: on the same GPU, and on another one. Needs no vLLM."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("trainers", [0, 1])
def test_an_image_is_read_and_refused_once_it_changes_or_its_trainer_is_gone(tmp_path: Path, trainers: int) -> None:
    from dora.ops.doctor.images import prove
    from dora.weights import cuda_image

    if trainers >= torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    found = prove(tmp_path, f"cuda:{trainers}", "cuda:0", cuda_image.made, cuda_image.opened)
    assert found["image_bytes"] > 0
