"""Engines on a real GPU: the order of copies and steps, arguments that pass through, memory that is exhausted."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import engine_cases as cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU"),
]
START_S = 600.0
CASES: dict[str, Callable[[str, Path], None]] = {
    "waits": cases.step_waits_for_its_kv,
    "does not wait": cases.step_that_does_not_wait_is_found,
    "draft model": cases.drafts_of_a_model_change_nothing,
    "parts": cases.parts_of_a_long_request_move,
    "no memory": cases.load_without_memory_is_a_conflict,
    "moe": partial(cases.engine_with, kind="moe"),
    "eager": partial(cases.engine_with, kind="dense", engine_args={"enforce_eager": True}),
    "chunks": partial(cases.engine_with, kind="dense", engine_args={"max_num_batched_tokens": 64}),
    "fp8 KV": partial(cases.engine_with, kind="dense", kv_dtype="fp8"),
    "int8": partial(cases.engine_with, kind="dense", quantisation="int8"),
    "fp8": partial(cases.engine_with, kind="dense", quantisation="fp8"),
    "fp8, KV in fp8": partial(cases.engine_with, kind="dense", quantisation="fp8", kv_dtype="fp8"),
    "Triton": partial(cases.engine_with, kind="dense", engine_args={"attention_backend": "TRITON_ATTN"}),
}


def in_a_process(case: Callable[[str, Path], Any], folder: Path) -> None:
    """A process has one engine."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
        processes.submit(case, "cuda", folder).result(START_S)


@pytest.mark.parametrize("case", CASES)
def test_an_engine_on_a_gpu(case: str, tmp_path: Path) -> None:
    in_a_process(CASES[case], tmp_path)


def test_engines_that_start_at_once_for_the_first_time_compile_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in a cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"{count} GPUs are visible")
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as processes:
        started = []
        for number in range(count):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", str(number))
            (tmp_path / str(number)).mkdir()
            started.append(processes.submit(cases.step_waits_for_its_kv, "cuda", tmp_path / str(number)))
        for each in started:
            each.result(START_S)
    assert len(list((tmp_path / "cache" / "vllm").glob("gpus-*"))) == count
