"""Stages without an engine in their own process: packages, imports, KV blocks, a whole run, NCCL."""

import json
import subprocess
import sys
import time
from typing import Any

from dora.host.last_words import reason_in
from dora.host.placement import placement_of
from dora.models import resolve_model
from dora.ops.doctor.verdict import Failed, Skipped, Subject
from dora.system.environment import without_secrets

BLOCKS = 64
LAYERS = 4
REPEATS = 8
DEMO_BYTES = 2 << 30


def environment(subject: Subject) -> dict[str, Any]:
    """Finds versions, the platform of vLLM and the GPUs that this process sees."""
    from importlib.metadata import version

    from dora.host.placement import gpus
    from dora.worker.vllm import environment as vllm_environment
    from dora.worker.vllm.device.choice import device_named
    from dora.worker.vllm.device.cpu import features
    from dora.worker.vllm.device.port import EngineSettings

    device = device_named(subject.device)
    placement = placement_of(subject.device, field="--device")
    vllm_environment.prepare(device.environment)
    import torch
    import vllm

    for patch in device.patches():
        patch.check_version(vllm.__version__)
    device.check_platform(EngineSettings(1, 64, 64, 32, device.default_dtype))
    found: dict[str, Any] = {
        "python": sys.version.split()[0],
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "cuda": torch.version.cuda,
        "cpu": features(),
        "gpus": [f"{gpu.model} {gpu.uuid}" for gpu in placement.gpus],
        "gpus_of_machine": len(gpus()),
    }
    if subject.device == "cuda" and not torch.cuda.is_available():
        raise Failed("torch sees no GPU: check the driver, and that torch is a CUDA build", **found)
    return found


def purity(subject: Subject) -> dict[str, Any]:
    """Imports all of the engine. vLLM's CPU modules replace parts of ``torch.cuda``, which a GPU engine must keep."""
    from dora.worker.vllm import environment as vllm_environment
    from dora.worker.vllm.device.choice import device_named

    device = device_named(subject.device)
    vllm_environment.prepare(device.environment)
    from importlib import import_module

    import torch

    import_module("dora.worker.vllm.core")
    import_module(device.worker_class.rpartition(".")[0])
    device.patches()
    replaced = [name for name in ("Stream", "Event") if not getattr(torch.cuda, name).__module__.startswith("torch.")]
    found = {"replaced": replaced}
    if subject.device == "cuda" and replaced:
        raise Failed(f"torch.cuda's {' and '.join(replaced)} were replaced: copies would not be awaited", **found)
    return found


def blocks(subject: Subject) -> dict[str, Any]:
    """Writes random blocks to KV tensors of the device, reads them back, and times it."""
    import numpy as np
    import torch

    from dora.worker.copying.cuda_blocks import DeviceStore

    shape = (BLOCKS, 8, 32, 256)
    tensors = {
        f"layer.{layer}": torch.zeros(shape, dtype=torch.bfloat16, device=subject.device) for layer in range(LAYERS)
    }
    store = DeviceStore(tensors, dict.fromkeys(tensors, 0), BLOCKS)
    random = np.random.default_rng(1)
    order = random.permutation(BLOCKS).tolist()
    written = {name: [random.integers(0, 255, (BLOCKS, size), np.uint8)] for name, size in store.layers}
    began_s = time.perf_counter()
    for _ in range(REPEATS):
        store.write([order], written)
        store.join()
        shown = store.show([order])
    took_s = time.perf_counter() - began_s
    for name in {*tensors, *shown}:
        if name not in shown or not np.array_equal(np.concatenate(shown[name]), written[name][0]):
            raise Failed(f"blocks of {name} came back with other bytes")
    size_bytes = 2 * REPEATS * BLOCKS * sum(size for _, size in store.layers)
    return {"gb_per_s": round(size_bytes / took_s / 1e9, 2), "order": store.orders}


def run(subject: Subject) -> dict[str, Any]:
    """Runs a demo of three steps on two workers, or on one where there is one GPU, then verifies its record."""
    out = subject.folder / "demo"
    model, workers = demo_of(subject, len(placement_of(subject.device, field="--device").gpus))
    report = _dora(
        *("demo", "--model", model, "--steps", "3", "--groups", "4", "--group-size", "4"),
        *("--workers", str(workers), "--window", "2", "--out", str(out), "--json"),
        *("--set", f"workers.device={subject.device}", "--set", f"service.run_folder={subject.folder / 'run'}"),
    )
    verified = _dora("verify", str(out / "record"), "--json")
    return {
        "model": model,
        "workers": workers,
        "groups_lost": report["groups_lost"],
        "staleness_max": report["staleness_max"],
        "trajectories": verified["trajectories"],
        "logprob_difference_max": verified["max_abs_diff"],
    }


def demo_of(subject: Subject, gpus: int) -> tuple[str, int]:
    """Returns the model and the number of workers of the demo. The trainer computes on the CPU: a model that is too
    large for that is replaced by a tiny one.
    """
    size_bytes = sum(file.stat().st_size for file in subject.model.glob("*.safetensors"))
    own = subject.device == "cuda" and subject.model != resolve_model("tiny") and size_bytes <= DEMO_BYTES
    return str(subject.model) if own else "tiny", 1 if gpus == 1 else 2


def two_gpus(subject: Subject) -> dict[str, Any]:
    """Sends bytes from one GPU to another by NCCL."""
    import torch

    count = torch.cuda.device_count() if subject.device == "cuda" else 0
    if count < 2:
        raise Skipped(f"{count} GPUs are visible")
    code = subprocess.run(
        [sys.executable, "-m", "dora.ops.doctor.nccl", str(subject.folder)],
        env=without_secrets(),
        capture_output=True,
        text=True,
        check=False,
    )
    if code.returncode:
        raise Failed(f"exit code {code.returncode}: {reason_in(code.stderr)}")
    found: dict[str, Any] = json.loads(code.stdout)
    return found


def _dora(*arguments: str) -> dict[str, Any]:
    argv = [sys.executable, "-m", "dora", *arguments]
    done = subprocess.run(argv, env=without_secrets(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"dora {arguments[0]} ended with {done.returncode}: {reason_in(done.stderr)}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found
