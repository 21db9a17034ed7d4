"""Skips this folder unless ``make check-cuda`` runs it."""

import os
from pathlib import Path

import pytest

IS_CHOSEN = "DORA_CUDA_BUILD" in os.environ

if IS_CHOSEN:
    from dora.worker.vllm.device.cuda import Cuda

    os.environ.update({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", **Cuda.environment})
    from tests.cuda_build import stand_in

    stand_in.install()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return None if IS_CHOSEN or collection_path.name == "conftest.py" else True


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from dora.models.tiny import make_tiny

    return make_tiny("dense", tmp_path_factory.mktemp("models") / "tiny", seed=1)
