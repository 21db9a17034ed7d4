"""Runs the stages one after the other, each in a process of its own that cannot take the others with it."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, get_args

from dora.errors import InvalidValue, one_of
from dora.host.last_words import reason_in
from dora.ops.doctor.stages import STAGES, Stage
from dora.ops.doctor.verdict import Outcome, StageResult, Subject
from dora.system.environment import without_secrets
from dora.weights.load_time import LEAST_BYTES_PER_S

COMPILE_S: Final = 300.0  # an engine's first start on a GPU: compilation and CUDA graphs
LOADS: Final = 8
LOG_LINES: Final = 60


def chosen(names: Sequence[str]) -> tuple[Stage, ...]:
    """Returns the stages of these names, in order; all without names. Raises InvalidValue for an unknown one."""
    known = [stage.name for stage in STAGES]
    for name in names:
        if name not in known:
            raise InvalidValue("stage", name, one_of(name, known))
    return tuple(stage for stage in STAGES if stage.name in names or not names)


def run_stages(
    stages: Sequence[Stage], device: str, model: Path, began: Callable[[Stage], None] = lambda _: None
) -> Iterator[StageResult]:
    """Yields each stage's verdict. ``began`` is called before each. After a failed first stage the others are skipped,
    since they would fail for the same reason.
    """
    for index, stage in enumerate(stages):
        began(stage)
        verdict = run_stage(stage, device, model)
        yield verdict
        if verdict.outcome == "failed" and index == 0 and stage is STAGES[0]:
            for later in stages[1:]:
                yield StageResult(later.name, "skipped", f"{stage.name} failed")
            return


def run_stage(stage: Stage, device: str, model: Path) -> StageResult:
    """Runs one stage in a new process. A failure keeps its folder, with the process's output and other logs."""
    folder = Path(tempfile.mkdtemp(prefix="dora-doctor-"))
    verdict, errors = _verdict_of(stage, Subject(device, model, folder), limit_s(stage, device, model))
    if verdict.outcome != "failed":
        shutil.rmtree(folder, ignore_errors=True)
        return verdict
    for large in folder.rglob("*.safetensors"):
        large.unlink()
    (folder / "stderr.log").write_text(errors + verdict.traceback)
    return replace(verdict, logs=last_lines(folder), folder=str(folder))


def limit_s(stage: Stage, device: str, model: Path) -> float:
    """Returns how long a stage may take. It grows with the model: an engine that compiles on a GPU, and the loads of a
    stage, six of which prove reloads.
    """
    size_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    return stage.limit_s + (COMPILE_S if device == "cuda" else 0.0) + LOADS * size_bytes / LEAST_BYTES_PER_S


def last_lines(folder: Path) -> dict[str, str]:
    """Returns the end of each log in a folder, by its path there."""
    found = {}
    for file in sorted(folder.rglob("*.log")):
        lines = file.read_text(errors="replace").splitlines()[-LOG_LINES:]
        found[str(file.relative_to(folder))] = "\n".join(lines)
    return found


def _verdict_of(stage: Stage, subject: Subject, most_s: float) -> tuple[StageResult, str]:
    arguments = [stage.name, subject.device, str(subject.model), str(subject.folder)]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "dora.ops.doctor", *arguments],
            env=without_secrets(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=most_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        written = (error.stderr or b"").decode(errors="replace")
        return StageResult(stage.name, "failed", f"no verdict within {most_s:g} s", {}, most_s), written
    failed = StageResult(stage.name, "failed", f"ended with {done.returncode}: {reason_in(done.stderr)}")
    try:
        verdict = StageResult(**json.loads(done.stdout))
    except (json.JSONDecodeError, TypeError):
        return failed, done.stderr
    is_sound = verdict.stage == stage.name and verdict.outcome in get_args(Outcome) and not done.returncode
    return verdict if is_sound else failed, done.stderr
