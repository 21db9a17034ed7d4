"""Measures a version's load into a vLLM engine, and the engine's repacking of its weights."""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from rich.table import Table
from safetensors.torch import load_file, save_file

from dora.models import default_cache, resolve_model

SLOTS: Final = 2


def load(model: str, rounds: int) -> tuple[Mapping[str, float], list[Table]]:
    """One engine of one thread, which gets two versions in turn from shared memory, and from a disk by vLLM itself."""
    from dora.worker.vllm.device.port import EngineSettings
    from dora.worker.vllm.engine import VllmEngine

    folder = resolve_model(model, default_cache())
    engine = VllmEngine(folder, EngineSettings(slots=SLOTS, kv_tokens=1024, max_model_len_tokens=256))
    loads: list[float] = []
    repacks: list[float] = []
    copies: list[float] = []
    reloads: list[float] = []
    parent = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="dora-perf-", dir=parent) as base:
        versions = [_version(folder, Path(base) / str(number), number) for number in range(2)]
        engine.load_weights(0, versions[0], None)
        copy = _copier(versions[0])
        for index in range(rounds):
            copies.append(_timed(copy))
            with _repacking(engine) as spent:
                loads.append(_timed(lambda at=index: engine._replace_weights(at, versions[at % 2])))
            repacks.append(spent[0])
            reloads.append(_timed(lambda: _reload(engine, folder)))
    engine.close()
    without = [each - repack for each, repack in zip(loads, repacks, strict=True)]
    size_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    found = Table(
        title=f"A load of {size_bytes / 1e6:.0f} MB into an engine; medians of {rounds}, ms of processor time"
    )
    for heading in ("copy of the bytes", "load", "of which repacking", "reload_weights from disk"):
        found.add_column(heading, justify="right")
    found.add_row(*(f"{statistics.median(each) * 1000:.0f}" for each in (copies, loads, repacks, reloads)))
    ratio = statistics.median(each / copied for each, copied in zip(without, copies, strict=True))
    beside = statistics.median(reload / each for reload, each in zip(reloads, loads, strict=True))
    return {"load_vs_memcpy": round(ratio, 2), "reload_vs_load": round(beside, 2)}, [found]


def _version(model: Path, folder: Path, number: int) -> Path:
    """The model, a little changed."""
    folder.mkdir()
    for file in model.iterdir():
        if file.is_file() and not file.name.endswith(".safetensors"):
            (folder / file.name).symlink_to(file)
    for file in model.glob("*.safetensors"):
        tensors = {name: tensor * (1 + 0.001 * number) for name, tensor in load_file(file).items()}
        save_file(tensors, folder / file.name, metadata={"format": "pt"})
    return folder


def _copier(folder: Path) -> Callable[[], Any]:
    """Copies a version's tensors into memory that was used before."""
    import torch

    tensors = [each for file in folder.glob("*.safetensors") for each in load_file(file).values()]
    places = [torch.zeros_like(tensor) for tensor in tensors]
    return lambda: [place.copy_(tensor) for place, tensor in zip(places, tensors, strict=True)]


@contextmanager
def _repacking(engine: Any) -> Iterator[list[float]]:
    """Seconds that the engine spends on bringing its layers' weights into its kernels' order."""
    from dora.engine_patches import registry

    spent, undo = [0.0], []
    runner = engine.core.model_executor.driver_worker.worker.model_runner
    methods = {type(each.quant_method) for each in runner.get_model().modules() if hasattr(each, "quant_method")}

    def timed(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            began_s = time.process_time()
            try:
                return function(*arguments, **options)
            finally:
                spent[0] += time.process_time() - began_s

        return call

    for owner, name in [(method, "process_weights_after_loading") for method in methods] + [(registry, "after_reload")]:
        original = getattr(owner, name)
        undo.append((owner, name, original))
        setattr(owner, name, timed(original))
    try:
        yield spent
    finally:
        for owner, name, original in undo:
            setattr(owner, name, original)


def _reload(engine: Any, folder: Path) -> None:
    worker = engine.core.model_executor.driver_worker.worker
    worker.vllm_config.load_config.load_format = "safetensors"
    worker.reload_weights(weights_path=str(folder))


def _timed(function: Callable[[], Any]) -> float:
    """Seconds of processor time: the engine has one thread, and the machine may have others to run."""
    began_s = time.process_time()
    function()
    return time.process_time() - began_s
