"""Runs the stages one after the other, each in a process of its own that cannot take the others with it."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import get_args

from dora.errors import InvalidValue, one_of
from dora.host.last_words import reason_in
from dora.ops.doctor.stages import STAGES, Stage
from dora.ops.doctor.verdict import Outcome, StageResult, Subject
from dora.system.environment import without_secrets


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
    with tempfile.TemporaryDirectory(prefix="dora-doctor-") as folder:
        subject = Subject(device, model, Path(folder))
        arguments = [stage.name, subject.device, str(subject.model), str(subject.folder)]
        try:
            done = subprocess.run(
                [sys.executable, "-m", "dora.ops.doctor", *arguments],
                env=without_secrets(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=stage.limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return StageResult(stage.name, "failed", f"no verdict within {stage.limit_s:g} s", {}, stage.limit_s)
    failed = StageResult(stage.name, "failed", f"ended with {done.returncode}: {reason_in(done.stderr)}")
    try:
        verdict = StageResult(**json.loads(done.stdout))
    except (json.JSONDecodeError, TypeError):
        return failed
    is_sound = verdict.stage == stage.name and verdict.outcome in get_args(Outcome) and not done.returncode
    return verdict if is_sound else failed
