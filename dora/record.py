"""The record of a run: every delivered trajectory and every published version, so that anyone can recompute both.

    DIR/trajectories.jsonl     one trajectory a line (keys: dora.trajectory.Trajectory), each trajectory once
    DIR/cancelled.jsonl        one group a line that was ended and not trained on, and why (keys: CancelledGroup)
    DIR/versions/<version>/    a Hugging Face folder: config, tokenizer, safetensors

Synchronous and for one thread at a time; the shell calls it in a thread.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Final, Self

from dora.errors import InvalidValue
from dora.trajectory import Trajectory

TRAJECTORIES_FILE: Final = "trajectories.jsonl"
CANCELLED_FILE: Final = "cancelled.jsonl"
VERSIONS_FOLDER: Final = "versions"
_OWN_PREFIX: Final = "dora-"  # the store's own notes stay in the store


@dataclass(frozen=True, slots=True)
class CancelledGroup:
    """A group that a filter, redundant rollout, a user or an engine that cannot take it has ended."""

    group_id: str
    prompt_id: str
    task_id: str
    version: int
    reason: str
    length_tokens: tuple[int, ...]  # of each response, as far as it came
    rewards: tuple[float | None, ...]  # None: no verdict, or a failed one
    cancelled_at: float  # seconds since the Unix epoch


def unwritable(folder: Path, error: OSError) -> InvalidValue:
    """What refuses a folder that no record can be written to."""
    return InvalidValue("record", str(folder), f"a folder that can be written ({error.strerror})")


class Recorder:
    """Appends to a record, or goes on with one that an earlier process left, even in the middle of a line."""

    def __init__(self, folder: Path) -> None:
        """Raises InvalidValue where ``folder`` cannot be written or holds something that is no record."""
        self._file = folder / TRAJECTORIES_FILE
        self._versions = folder / VERSIONS_FOLDER
        try:
            self._versions.mkdir(parents=True, exist_ok=True)
            for unfinished in self._versions.glob(".*"):
                shutil.rmtree(unfinished)
            self._stream = self._file.open("a+b")
            self._cancelled = (folder / CANCELLED_FILE).open("a+b")
        except OSError as error:
            raise unwritable(folder, error) from error
        self._written = self._read_ids()  # an id of some 50 bytes for a line of some thousands
        for _ in _whole_lines(self._cancelled):
            pass

    def append(self, trajectories: Iterable[Trajectory]) -> int:
        """Writes those not yet recorded and flushes; how many they were."""
        lines = []
        for trajectory in trajectories:
            if trajectory.trajectory_id not in self._written:
                self._written.add(trajectory.trajectory_id)
                lines.append(json.dumps(trajectory.to_json_dict(), allow_nan=False).encode() + b"\n")
        self._stream.write(b"".join(lines))
        self._stream.flush()
        return len(lines)

    def append_cancelled(self, group: CancelledGroup) -> None:
        self._cancelled.write(json.dumps(asdict(group), allow_nan=False).encode() + b"\n")
        self._cancelled.flush()

    def keep_version(self, version: int, folder: Path) -> Path:
        """Copies a version's Hugging Face folder unless it is kept already; a file on the same disk is hard-linked."""
        kept = self._versions / str(version)
        if kept.is_dir():
            return kept
        unfinished = self._versions / f".{version}"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        for file in sorted(folder.iterdir()):
            if file.is_file() and not file.name.startswith((_OWN_PREFIX, ".")):
                _link_or_copy(file.resolve(), unfinished / file.name)
        os.rename(unfinished, kept)
        return kept

    def drop_version(self, version: int) -> None:
        """Removes a version that no worker could load: nothing was sampled under it. An unknown one is ignored."""
        kept, gone = self._versions / str(version), self._versions / f".{version}"
        if kept.is_dir():
            os.rename(kept, gone)  # a reader sees the whole folder or none
            shutil.rmtree(gone)

    def close(self) -> None:
        self._stream.close()
        self._cancelled.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _read_ids(self) -> set[str]:
        ids = set()
        for number, line in enumerate(_whole_lines(self._stream), start=1):
            try:
                ids.add(str(json.loads(line)["trajectory_id"]))
            except (ValueError, KeyError, TypeError) as error:
                raise InvalidValue(f"{self._file.name} line {number}", line[:80], "a trajectory record") from error
        return ids


def _whole_lines(stream: BinaryIO) -> Iterator[bytes]:
    """The lines of a file. At its end one that a crash has torn is cut off: what it said was never acknowledged."""
    stream.seek(0)
    whole_bytes = 0
    for line in stream:
        if not line.endswith(b"\n"):
            break
        whole_bytes += len(line)
        yield line
    stream.truncate(whole_bytes)


def _link_or_copy(source: Path, target: Path) -> None:
    # Weights files are never written again once they are whole, so a link is as good as a copy.
    if source.stat().st_dev == target.parent.stat().st_dev:
        os.link(source, target)
    else:
        shutil.copyfile(source, target)
