"""The run record: every delivered trajectory and every published version, so that anyone can recompute both.

    DIR/trajectories.jsonl     one trajectory a line (keys: dora.data.trajectory.Trajectory), each trajectory once
    DIR/cancelled.jsonl        one cancelled group a line, with the reason (keys: CancelledGroup)
    DIR/steps.jsonl            one committed step a line (keys: CommittedStep), each step once.
                               Lines between them name versions that were withdrawn and republished
    DIR/evaluations.jsonl      one ended evaluation of the service's own series a line (keys: Evaluated and Score)
    DIR/versions/<version>/    a Hugging Face folder: config, tokenizer, safetensors; and rollout.json (keys:
                               EngineNumerics) if the engines did not compute in plain float32. Unless the step's
                               ``weights`` is "all", a version's folder may be deleted after two later commits

A step's line is written last, so everything that it names is on disk. Synchronous and for one thread at a time; the
shell calls it in a thread. A failed write or fsync raises OSError, leaves nothing half written, and may be repeated.
"""

import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final, Self

from dora.data.record_content import (
    ALL_WEIGHTS,
    CANCELLED_FILE,
    EVALUATIONS_FILE,
    LINES_FILES,
    REPUBLISHED,
    STEPS_FILE,
    TRAJECTORIES_FILE,
    WITHDRAWN,
    CancelledGroup,
    CommittedStep,
    RecordContent,
    unwritable,
)
from dora.data.score import Evaluated
from dora.data.trajectory import Trajectory
from dora.data.types import PLAIN_NUMERICS, EngineNumerics
from dora.system.files import link_or_copy, sync_folder
from dora.system.line_file import LineFile

VERSIONS_FOLDER: Final = "versions"
ROLLOUT_FILE: Final = "rollout.json"
NO_WEIGHTS: Final = "none"
EVERY: Final = "every "  # then a number
_OWN_PREFIX: Final = "dora-"  # prefix of the store's own files, which are not copied


def keeps_weights(weights: str, version: int) -> bool:
    """Whether the setting ``record_weights`` keeps this version for good. Raises ValueError for an unknown setting."""
    if version == 0 or weights == ALL_WEIGHTS:
        return True
    return weights != NO_WEIGHTS and version % int(weights.removeprefix(EVERY)) == 0


class Recorder(RecordContent):
    """Appends to a record, or continues one of an earlier process, even after a torn line."""

    def __init__(self, folder: Path, numerics: EngineNumerics = PLAIN_NUMERICS, weights: str = ALL_WEIGHTS) -> None:
        """``numerics`` are of the sampling engines, ``weights`` is the setting ``record_weights``.

        Raises InvalidValue if ``folder`` cannot be written or holds something other than a record.
        """
        self._numerics = numerics
        # whether a version has fallen back to full precision
        self.is_full: Callable[[int], bool] = lambda version: False
        self._weights = weights
        self._passing: set[int] = set()  # versions whose weights are deleted after two later commits
        self._versions = folder / VERSIONS_FOLDER
        try:
            self._versions.mkdir(parents=True, exist_ok=True)
            for unfinished in self._versions.glob(".*"):
                shutil.rmtree(unfinished)
            self._trajectories = LineFile(folder / TRAJECTORIES_FILE)
            self._cancelled = LineFile(folder / CANCELLED_FILE)
            self._steps = LineFile(folder / STEPS_FILE)
            sync_folder(folder)
        except OSError as error:
            raise unwritable(folder, error) from error
        super().__init__(folder)
        self._unwritten = b""  # lines that a repeated commit keeps, until its own line is written
        self._kept: dict[int, bytes] = {}  # version -> the identity that it was kept under
        self._doubted: set[int] = set()  # versions of which a write or fsync failed last

    def _lines(self, name: str) -> Iterator[bytes]:
        files = {TRAJECTORIES_FILE: self._trajectories, CANCELLED_FILE: self._cancelled, STEPS_FILE: self._steps}
        return files[name].lines()

    def append(self, trajectories: Iterable[Trajectory]) -> int:
        """Writes trajectories that are not yet recorded; returns their number."""
        lines = {
            each.trajectory_id: json.dumps(each.to_json_dict(), allow_nan=False).encode() + b"\n"
            for each in trajectories
            if each.trajectory_id not in self._written
        }
        self._trajectories.append(b"".join(lines.values()))
        self._written.update(lines)
        return len(lines)

    def append_cancelled(self, group: CancelledGroup) -> None:
        self._cancelled.append(json.dumps(asdict(group), allow_nan=False).encode() + b"\n")
        self._ended.add(group.group_id)

    def append_evaluation(self, evaluated: Evaluated) -> None:
        """Writes the line of an ended evaluation of the service's own series, durably."""
        file = LineFile(self.folder / EVALUATIONS_FILE)
        try:
            deque(file.lines(), maxlen=0)
            file.append_durably(json.dumps(evaluated.to_json_dict(), allow_nan=False).encode() + b"\n")
        finally:
            file.close()

    def carry_on(self, newest: int, cancelled: Iterable[CancelledGroup]) -> None:
        """Continues after a restart: removes versions above ``newest`` and writes missing ``cancelled`` groups."""
        for kept in self._versions.iterdir():
            if kept.name.isdigit() and int(kept.name) > newest:
                shutil.rmtree(kept)
        for group in cancelled:
            if group.group_id not in self._ended:
                self.append_cancelled(group)

    def republish(self, version: int, folder: Path, identity: bytes) -> None:
        """Stores new weights of a withdrawn version, and writes its line."""
        self.keep_version(version, folder, identity, anew=True)
        line = json.dumps({REPUBLISHED: version}).encode() + b"\n"
        self._steps.append_durably(line)
        self._last_lines.append(line)

    def commit(self, step: CommittedStep, folder: Path, identity: bytes = b"") -> None:
        """Stores the step's version, then makes the whole record durable, the step's line last.

        ``identity`` is of the version's weights. It replaces a version with the same number and another identity.
        """
        self.keep_version(step.version, folder, identity)
        self._trajectories.sync()
        self._cancelled.sync()
        self._append_step(replace(step, weights=self._weights))
        self._delete_passing(step.version - 1)

    def _append_step(self, step: CommittedStep) -> None:
        """Appends the step's line. A commit may be repeated: its line takes the place of an earlier one, which was not
        acknowledged, and of later lines that withdrew its version.
        """
        line = json.dumps(asdict(step)).encode() + b"\n"
        if self.last is not None and self.last.step == step.step:
            withdrawn = _withdrawn_line(step.version)
            self._steps.cut_last(sum(map(len, self._last_lines)))
            self._unwritten = b"".join(each for each in self._last_lines[1:] if each != withdrawn)
            self.last, self._last_lines = None, []
        self._steps.append_durably(self._unwritten + line)
        self._unwritten = b""
        self._take(step, line)

    def _take(self, step: CommittedStep, line: bytes) -> None:
        super()._take(step, line)
        (self._passing.discard if keeps_weights(step.weights, step.version) else self._passing.add)(step.version)

    def keep_version(self, version: int, folder: Path, identity: bytes = b"", *, anew: bool = False) -> Path:
        """Copies a version's Hugging Face folder; a file on the same disk is hard-linked.

        A stored version stays as it is, unless it has another identity or is republished (``anew``): an earlier process
        may have stored other weights.
        """
        kept = self._versions / str(version)
        is_sure = kept.is_dir() and version not in self._doubted
        if not anew and is_sure and self._kept.get(version, identity) == identity:
            return kept
        unfinished = self._versions / f".{version}"
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            unfinished.mkdir()
            for file in sorted(folder.iterdir()):
                if file.is_file() and not file.name.startswith((_OWN_PREFIX, ".")):
                    link_or_copy(file.resolve(), unfinished / file.name, may_link=version not in self._doubted)
            numerics = self._numerics.full() if self.is_full(version) else self._numerics
            if numerics != PLAIN_NUMERICS:
                (unfinished / ROLLOUT_FILE).unlink(missing_ok=True)  # a link to the model's own file of that name
                (unfinished / ROLLOUT_FILE).write_text(json.dumps(asdict(numerics)) + "\n")
            sync_folder(unfinished)
            if kept.is_dir():
                shutil.rmtree(kept)
            os.rename(unfinished, kept)
            sync_folder(self._versions)
        except OSError:
            self._doubted.add(version)
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        self._doubted.discard(version)
        self._kept[version] = identity
        return kept

    def keeps(self, version: int) -> bool:
        """Whether this service's setting keeps the version's weights for good."""
        return keeps_weights(self._weights, version)

    def _delete_passing(self, before: int) -> None:
        """Deletes weights that are not kept for good. The last two versions stay, as the last may be withdrawn.

        A failure is no fault of the commit: the next one tries again.
        """
        for version in sorted(each for each in self._passing if each < before):
            kept, gone = self._versions / str(version), self._versions / f".{version}"
            with suppress(OSError):
                if kept.is_dir():
                    os.rename(kept, gone)  # readers see the whole folder or none
                if gone.is_dir():
                    shutil.rmtree(gone)
                self._passing.discard(version)

    def drop_version(self, version: int) -> None:
        """Removes a version that no worker could load, and writes its line: nothing was sampled under it."""
        line = _withdrawn_line(version)
        self._steps.append(line)
        self._last_lines.append(line)
        self._kept.pop(version, None)
        kept, gone = self._versions / str(version), self._versions / f".{version}"
        if kept.is_dir():
            os.rename(kept, gone)  # readers see the whole folder or none
            shutil.rmtree(gone)

    def close(self) -> None:
        for file in (self._trajectories, self._cancelled, self._steps):
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _withdrawn_line(version: int) -> bytes:
    return json.dumps({WITHDRAWN: version}).encode() + b"\n"


__all__ = [
    "ALL_WEIGHTS",
    "CANCELLED_FILE",
    "EVALUATIONS_FILE",
    "LINES_FILES",
    "NO_WEIGHTS",
    "REPUBLISHED",
    "ROLLOUT_FILE",
    "STEPS_FILE",
    "TRAJECTORIES_FILE",
    "VERSIONS_FOLDER",
    "WITHDRAWN",
    "CancelledGroup",
    "CommittedStep",
    "Recorder",
    "keeps_weights",
    "unwritable",
]
