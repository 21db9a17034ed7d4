"""What is tried with an engine on a GPU, each in a process of its own (``test_engines``). All but one run on CPUs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from dora.errors import Conflict
from dora.models.tiny import make_tiny
from dora.ops.doctor.engine_checks import PLAIN, check_moves, late_copies
from dora.ops.doctor.verdict import Failed, Subject
from dora.worker.vllm.device.choice import device_named
from tests.refusals import refused


def subject_of(device: str, folder: Path, kind: Any = "dense") -> Subject:
    return Subject(device, make_tiny(kind, folder / "model", seed=1), folder)


def started(subject: Subject, **settings: Any) -> Any:
    from dora.worker.vllm.device.port import EngineSettings
    from dora.worker.vllm.engine import VllmEngine

    is_cpu = subject.device == "cpu"
    engine = VllmEngine(
        subject.model,
        EngineSettings(16, 8192, 512, block_tokens=32 if is_cpu else 0, memory_share=0.4, **settings),
        device=device_named(subject.device),
    )
    engine.load_weights(0, subject.model, None)  # on a GPU with the proof of reloads
    return engine


def step_waits_for_its_kv(device: str, folder: Path) -> None:
    assert late_copies(subject_of(device, folder))["moves"] == 8


def step_that_does_not_wait_is_found(device: str, folder: Path) -> None:
    from dora.worker.vllm.connector import SnapshotConnector

    def nothing(self: SnapshotConnector) -> None:
        pass

    SnapshotConnector.join = nothing  # type: ignore[method-assign]
    try:
        late_copies(subject_of(device, folder))
    except Failed as error:
        assert "moved after 1 tokens" in str(error)
    else:
        raise AssertionError("the stage found nothing")


def engine_with(device: str, folder: Path, kind: str, **settings: Any) -> None:
    """It loads, proves its reloads, samples, and moves a request exactly."""
    engine = started(subject_of(device, folder, kind), **settings)
    assert check_moves(engine, [replace(PLAIN, max_tokens=engine.capability.block_tokens + 8)]) == 3


def drafts_of_a_model_change_nothing(device: str, folder: Path) -> None:
    """The model itself is the draft model. Both have the same noise, and nearly the same logits."""
    from tests.contract.driver import farthest, make_request, run
    from tests.contract.guesses import model_drafter

    subject = subject_of(device, folder)
    engine = started(subject, dtype="float32", speculation=f"model:{subject.model}")
    requests = [make_request(number, version=0) for number in range(4)]
    drafter = engine.core.scheduler.drafter = model_drafter(engine._drafter)
    found = run(engine, requests)
    engine.core.scheduler.drafter = None
    assert farthest(found, run(engine, requests)) < 1e-3
    assert drafter.accepted_tokens > 0.9 * drafter.drafted_tokens > 0


def parts_of_a_long_request_move(device: str, folder: Path) -> None:
    """Of full blocks, as many are shown as a part has."""
    from dora.ops.doctor.engine_checks import request, stepped

    engine = started(subject_of(device, folder))
    engine.add(request("r", PLAIN))
    stepped(engine, "r", 100)
    whole = engine.full_blocks("r", 0)
    part = engine.full_blocks("r", 1, 2)
    assert part.end == whole.end >= 3
    assert {sum(map(len, pieces)) for pieces in part.blocks.values()} == {2}


def load_without_memory_is_a_conflict(device: str, folder: Path) -> None:
    """The engine can load again once there is memory."""
    import torch

    subject = subject_of(device, folder)
    engine = started(subject)
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(1e-6)
    with refused(Conflict, field="workers.gpu_memory_utilisation"):
        engine.load_weights(1, subject.model, None)
    assert engine.version is None and free_bytes > 0
    torch.cuda.set_per_process_memory_fraction(1.0)
    engine.load_weights(1, subject.model, None)
    assert engine.version == 1
