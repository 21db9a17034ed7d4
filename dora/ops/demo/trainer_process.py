"""The reference trainer in a process of its own, which keeps torch out of the service's process."""

import asyncio
import json
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from dora.host.last_words import last_words

LINE_BYTES_MAX = 16 << 20  # a step's line names every group of the step
STOP_GRACE_S = 10.0


@dataclass(frozen=True, slots=True)
class TrainedStep:
    step: int
    committed_s: float  # event loop time
    took_s: float  # since the trainer turned to it
    waited_s: float  # the part of it that the trainer waited for groups


class TrainerProcess:
    """Runs ``python -m dora.trainers.grpo --json``. ``trained`` and ``replayed`` grow by one step per output
    line.

    The token is passed in the environment, which other users of the host cannot read.
    """

    def __init__(self, arguments: list[str], token: str, threads: int, log: Path, trained_file: Path) -> None:
        self._argv = [sys.executable, "-m", "dora.trainers.grpo", *arguments, "--threads", str(threads), "--json"]
        self._environment = {**os.environ, "DORA_TOKEN": token, "OMP_NUM_THREADS": str(threads)}
        self._log = log
        self._trained_file = trained_file
        self._process: asyncio.subprocess.Process | None = None
        self.trained: dict[int, list[str]] = {}
        self.replayed: dict[int, list[str]] = {}
        self.committed: list[TrainedStep] = []

    async def run(self) -> int:
        """Reads the trainer's output until it ends; returns its exit code."""
        with self._log.open("wb") as log, self._trained_file.open("wb") as trained_file:
            process = await asyncio.create_subprocess_exec(
                *self._argv,
                env=self._environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=LINE_BYTES_MAX,
            )
            self._process = process
            assert process.stdout is not None
            async for line in process.stdout:
                step = json.loads(line)
                # A step trained twice must show, so it extends the list instead of replacing it.
                now_s = asyncio.get_running_loop().time()
                self.committed.append(TrainedStep(step["step"], now_s, step["seconds"], step["waited_s"]))
                self.trained.setdefault(step["step"], []).extend(step["group_ids"])
                self.replayed.setdefault(step["step"], []).extend(step["replayed_ids"])
                trained_file.write(line)
                trained_file.flush()
            return await process.wait()

    def last_words(self) -> str:
        """The reason of the trainer's end, from its stderr."""
        return last_words(self._log)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_GRACE_S)
        except TimeoutError:
            process.kill()
            await process.wait()
