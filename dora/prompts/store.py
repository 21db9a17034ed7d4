"""The checked and tokenized prompts of a file, stored outside memory and read by number.

A prompt takes 8 bytes of memory, and its own size (4 bytes per token, text, verifier) in a temporary file, which stays
in memory up to ``MEMORY_BYTES`` and disappears with the process. The source file is read only once, so later changes of
it have no effect.
"""

from array import array
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Final

import msgpack
import numpy as np
from blake3 import blake3

from dora.data.types import Prompt
from dora.errors import Conflict, InvalidValue

MEMORY_BYTES: Final = 64 << 20
PROMPTS_MAX: Final = 1 << 24


class PromptStore:
    """The prompts of a file. They are appended, then closed by ``check_ids``, then read in any order."""

    def __init__(self) -> None:
        self._file = SpooledTemporaryFile(max_size=MEMORY_BYTES, prefix="dora-prompts-")  # noqa: SIM115 # kept open
        self._ends = array("Q", [0])
        self._digests = array("Q")  # of ids, while prompts are appended
        self._positions: list[tuple[int, Path]] = []  # the number of the first prompt of each file
        self._rows = array("I")  # each prompt's row in its file

    def __len__(self) -> int:
        return len(self._ends) - 1

    def append(self, prompt: Prompt, path: Path, row: int) -> None:
        """Appends a prompt. Raises InvalidValue if there are too many, or if the temporary file has no room."""
        if len(self) >= PROMPTS_MAX:
            raise InvalidValue("--prompts", str(path), f"a source of at most {PROMPTS_MAX:,} prompts")
        packed = msgpack.packb(
            (
                prompt.prompt_id,
                prompt.task_id,
                np.asarray(prompt.token_ids, "<i4").tobytes(),
                prompt.text,
                prompt.group_size,
                dict(prompt.sampling),
                prompt.verifier_json,
                prompt.priority,
                prompt.environment,
                prompt.group_size_min,
            )
        )
        try:
            self._file.write(packed)
        except OSError as error:
            allowed = f"small enough for the temporary folder, TMPDIR ({error.strerror})"
            raise InvalidValue("--prompts", str(path), allowed) from error
        if not self._positions or self._positions[-1][1] != path:
            self._positions.append((len(self), path))
        self._rows.append(row)
        self._digests.append(int.from_bytes(blake3(prompt.prompt_id.encode()).digest(8), "little"))
        self._ends.append(self._ends[-1] + len(packed))

    def check_ids(self) -> None:
        """Raises Conflict, with both locations, for an id that two prompts have."""
        digests = np.frombuffer(self._digests, np.uint64)
        order = np.argsort(digests, kind="stable")
        for at in np.flatnonzero(digests[order[:-1]] == digests[order[1:]]).tolist():
            first, second = sorted((int(order[at]), int(order[at + 1])))
            name = self[second].prompt_id
            if self[first].prompt_id == name:
                (path, row), (before, line) = self._place(second), self._place(first)
                where = f"line {line}" if before == path else f"{before}:{line}"
                why = f"is used in {where} already"
                raise Conflict(f"{path}:{row}: prompt_id", name, "a unique id", why)
        del digests
        self._digests, self._rows, self._positions = array("Q"), array("I"), []

    def __getitem__(self, number: int) -> Prompt:
        start = self._ends[number]
        self._file.seek(start)
        values = msgpack.unpackb(self._file.read(self._ends[number + 1] - start))
        prompt_id, task_id, token_ids, text, group_size, sampling, verifier_json, priority, environment, least = values
        return Prompt(
            prompt_id=prompt_id,
            task_id=task_id,
            token_ids=tuple(np.frombuffer(token_ids, "<i4").tolist()),
            text=text,
            group_size=group_size,
            sampling={name: tuple(value) if isinstance(value, list) else value for name, value in sampling.items()},
            verifier_json=verifier_json,
            priority=priority,
            environment=environment,
            group_size_min=least,
        )

    def _place(self, number: int) -> tuple[Path, int]:
        path = next(path for first, path in reversed(self._positions) if first <= number)
        return path, self._rows[number]
