"""The record of a run: every delivered trajectory and every published version, so that anyone can recompute both.

    DIR/trajectories.jsonl     one trajectory a line (keys: dora.trajectory.Trajectory), each trajectory once
    DIR/versions/<version>/    a Hugging Face folder: config, tokenizer, safetensors

Synchronous and for one thread at a time; the shell calls it in a thread.
"""

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Self

from dora.errors import InvalidValue
from dora.trajectory import Trajectory

TRAJECTORIES_FILE: Final = "trajectories.jsonl"
VERSIONS_FOLDER: Final = "versions"
_OWN_PREFIX: Final = "dora-"  # the store's own notes stay in the store


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
        except OSError as error:
            raise InvalidValue("record", str(folder), f"a folder that can be written ({error.strerror})") from error
        self._written = self._read_ids()  # an id of some 50 bytes for a line of some thousands

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

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _read_ids(self) -> set[str]:
        ids = set()
        self._stream.seek(0)
        whole_bytes = 0
        for number, line in enumerate(self._stream, start=1):
            if not line.endswith(b"\n"):
                break  # torn by a crash: its trajectory was never acknowledged and is delivered again
            try:
                ids.add(str(json.loads(line)["trajectory_id"]))
            except (ValueError, KeyError, TypeError) as error:
                raise InvalidValue(f"{self._file.name} line {number}", line[:80], "a trajectory record") from error
            whole_bytes += len(line)
        self._stream.truncate(whole_bytes)
        return ids


def _link_or_copy(source: Path, target: Path) -> None:
    # Weights files are never written again once they are whole, so a link is as good as a copy.
    if source.stat().st_dev == target.parent.stat().st_dev:
        os.link(source, target)
    else:
        shutil.copyfile(source, target)
