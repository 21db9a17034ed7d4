"""Reads a run record and changes nothing in it. dora.data.run_record lists its files."""

import errno
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dora.errors import InvalidValue
from dora.system.line_file import whole_lines

TRAJECTORIES_FILE: Final = "trajectories.jsonl"
CANCELLED_FILE: Final = "cancelled.jsonl"
STEPS_FILE: Final = "steps.jsonl"
EVALUATIONS_FILE: Final = "evaluations.jsonl"
LINES_FILES: Final = (TRAJECTORIES_FILE, CANCELLED_FILE, STEPS_FILE)
WITHDRAWN: Final = "withdrawn_version"  # the only key of a line: no worker could load this version
REPUBLISHED: Final = "republished_version"  # the only key of a line: the version was republished
ALL_WEIGHTS: Final = "all"
# Begin of a trajectory's line: a start reads only the ids of a file of gigabytes.
_FIRST_ID: Final = re.compile(rb'\{"trajectory_id": "([^"\\]+)", ')


@dataclass(frozen=True, slots=True)
class CancelledGroup:
    """A group that was ended by a filter, redundant rollout, a user, or an engine that cannot take it."""

    group_id: str
    prompt_id: str
    task_id: str
    version: int
    reason: str
    length_tokens: tuple[int, ...]  # of each response at that time
    rewards: tuple[float | None, ...]  # None: no verdict, or a failed one
    cancelled_at: float  # seconds since the Unix epoch


@dataclass(frozen=True, slots=True)
class CommittedStep:
    step: int
    version: int  # that it published: step + 1
    groups: Mapping[str, int]  # group id -> its trajectories
    committed_at: float  # seconds since the Unix epoch
    staleness_groups: tuple[int, ...] = ()  # by staleness, from 0
    waited_s: float | None = None  # the trainer's wait for groups; None: unknown
    weights: str = ALL_WEIGHTS  # the service's ``record_weights``; the recorder fills it in
    replayed: tuple[str, ...] = ()  # groups of earlier steps that the trainer says it trained on once more
    drafts: tuple[int, ...] = ()  # tokens that engines drafted and accepted since the commit before; empty: none
    mismatches: tuple[Mapping[str, Any], ...] = ()  # as the trainer tells (keys: dora.data.mismatch.Mismatch)


def unwritable(folder: Path, error: OSError) -> InvalidValue:
    return InvalidValue("record", str(folder), f"a writable folder ({error.strerror})")


class RecordContent:
    """The content of a record, which another process may go on writing. A torn line at the end does not count."""

    def __init__(self, folder: Path) -> None:
        """Raises InvalidValue if ``folder`` holds something other than a record, or could not be written."""
        self.folder = folder
        try:
            self._written = self._read_ids()  # an id of some 50 bytes for a line of some thousands
            self.committed: dict[int, float] = {}  # step -> when it was committed
            self.last: CommittedStep | None = None  # its line is the first of
            self._last_lines: list[bytes] = []
            self._counts: dict[int, int] = {}  # step -> its trajectories
            self._read_steps()
            self._ended = self._read_ended()
            self.evaluations = self._read_evaluations()  # as JSON
            self.evaluated = {each["version"] for each in self.evaluations if not each["missing"]}  # versions
        except OSError as error:
            raise unwritable(folder, error) from error

    @property
    def is_empty(self) -> bool:
        return not (self._written or self._ended or self.committed)

    @property
    def missing_trajectories(self) -> int:
        """A lower bound of the trajectories of committed steps that are not in the record."""
        return max(0, sum(self._counts.values()) - len(self._written))

    def _lines(self, name: str) -> Iterator[bytes]:
        file = self.folder / name
        if not file.exists():
            return iter(())
        if not os.access(file, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
        return whole_lines(file)

    def _take(self, step: CommittedStep, line: bytes) -> None:
        self.committed[step.step], self._counts[step.step] = step.committed_at, sum(step.groups.values())
        self.last, self._last_lines = step, [line]

    def _read_steps(self) -> None:
        for number, line in enumerate(self._lines(STEPS_FILE), start=1):
            try:
                tree = json.loads(line)
                if WITHDRAWN in tree or REPUBLISHED in tree:
                    self._last_lines.append(line)
                    continue
                tree["staleness_groups"] = tuple(tree.get("staleness_groups", ()))
                tree["replayed"] = tuple(tree.get("replayed", ()))
                tree["mismatches"] = tuple(tree.get("mismatches", ()))
                self._take(CommittedStep(**tree), line)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise InvalidValue(f"{STEPS_FILE} line {number}", line[:80], "a committed step") from error

    def _read_ended(self) -> set[str]:
        ended = set()
        for number, line in enumerate(self._lines(CANCELLED_FILE), start=1):
            try:
                ended.add(str(json.loads(line)["group_id"]))
            except (ValueError, KeyError, TypeError) as error:
                raise InvalidValue(f"{CANCELLED_FILE} line {number}", line[:80], "a cancelled group") from error
        return ended

    def _read_evaluations(self) -> list[dict[str, Any]]:
        found = []
        file = self.folder / EVALUATIONS_FILE
        for number, line in enumerate(whole_lines(file) if file.exists() else (), start=1):
            try:
                tree = json.loads(line)
                found.append({**tree, "version": int(tree["version"]), "missing": tree["missing"]})
            except (ValueError, KeyError, TypeError) as error:
                raise InvalidValue(f"{EVALUATIONS_FILE} line {number}", line[:80], "an evaluation") from error
        return found

    def _read_ids(self) -> set[str]:
        ids = set()
        for number, line in enumerate(self._lines(TRAJECTORIES_FILE), start=1):
            found = _FIRST_ID.match(line)
            try:
                ids.add(found[1].decode() if found else str(json.loads(line)["trajectory_id"]))
            except (ValueError, KeyError, TypeError) as error:
                raise InvalidValue(f"{TRAJECTORIES_FILE} line {number}", line[:80], "a trajectory record") from error
        return ids
