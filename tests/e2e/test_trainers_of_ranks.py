"""``examples/fsdp2_loop.py`` and ``examples/accelerate_loop.py``: two ranks make the step of ``grpo_loop.py``."""

import argparse
import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from examples.grpo_loop import train
from tests.contract.trainer_service import TOKEN, Running, StartService
from tests.snippets import ROOT

STEPS, LEARNING_RATE = 2, 1e-3
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ACCELERATE = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1"]
ACCELERATE += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]


async def ran(launcher: list[str], name: str, service: Running) -> str:
    """The output of an example on two ranks; fails if it does."""
    argv = [*launcher, str(ROOT / "examples" / name), "--address", service.address, "--groups", "2"]
    environment = {**os.environ, "DORA_TOKEN": TOKEN, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, *argv, "--steps", str(STEPS), "--lr", str(LEARNING_RATE),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment,
    )  # fmt: skip
    try:
        out = (await process.communicate())[0].decode(errors="replace")
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    assert process.returncode == 0, out[-4000:]
    return out


@pytest.mark.full
@pytest.mark.parametrize(
    ("launcher", "name"),
    [(TORCHRUN, "fsdp2_loop.py"), (ACCELERATE, "accelerate_loop.py")],
    ids=["fsdp2", "accelerate"],
)
async def test_two_ranks_publish_what_one_process_does(
    start_service: StartService, tmp_path: Path, tiny_dense: Path, launcher: list[str], name: str
) -> None:
    two, one = [await start_service(tmp_path / each, tiny_dense) for each in ("two", "one")]
    out = await ran(launcher, name, two)
    assert [line.partition(":")[0] for line in out.splitlines() if line.startswith("step")] == ["step 0", "step 1"], out
    options = argparse.Namespace(
        address=one.address, groups=2, steps=STEPS, rows=16, lr=LEARNING_RATE, device="cpu", model=""
    )
    await asyncio.to_thread(train, options, TOKEN)
    assert [commit.version for commit in two.service.commits] == [1, 2]
    assert two.service.commits[0].metrics["tokens"] == one.service.commits[0].metrics["tokens"]
    norms = [each.service.commits[0].metrics["gradient_norm"] for each in (two, one)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    theirs, ours = (load_file(each.service.store.folder(2) / "model.safetensors") for each in (two, one))
    assert theirs.keys() == ours.keys()
    for tensor in ours:  # Adam makes steps as large as others where a gradient is its own rounding: a few elements
        assert ((theirs[tensor] - ours[tensor]).abs() > 2e-5).float().mean() < 5e-3, tensor
