"""Times several engines together, each in its own process (``dora.worker.profiler``)."""

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

from dora.data.engine_samples import Measurement, measurement_of
from dora.errors import DoraError
from dora.system.environment import without_secrets
from dora.worker.profiling import USUAL
from dora.worker.timing import Timing

READY: Final = "ready"  # the first line of a profiler
STOP_GRACE_S: Final = 30.0


class ProfilerFailed(DoraError):
    """A timed engine's process ended before its result."""


def measure_side_by_side(timing: Timing, engines: int) -> tuple[Measurement, ...]:
    """Returns the measurement of each of ``engines`` while the others were busy.

    Raises InvalidValue for engines that are too small to be measured, ProfilerFailed.
    """
    timing.grid(USUAL)  # refuses what is too small before vLLM is loaded
    with ExitStack() as until_end:
        arguments = [["--place", str(place), *timing.arguments()] for place in range(engines)]
        profilers = [until_end.enter_context(_Profiler(each)) for each in arguments]
        for profiler in profilers:
            profiler.expect_ready()
        for profiler in profilers:
            profiler.go()
        return tuple(profiler.measurement() for profiler in profilers)


class _Profiler:
    """One process, ended with its ``with`` block."""

    def __init__(self, arguments: Sequence[str]) -> None:
        argv = [sys.executable, "-m", "dora.worker.profiler", *arguments]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(argv, env=without_secrets(), stdin=pipe, stdout=pipe, text=True)

    def __enter__(self) -> "_Profiler":
        return self

    def __exit__(self, *exception: object) -> None:
        """Closes its input, which ends the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def expect_ready(self) -> None:
        if (line := self._line()) != READY:
            raise ProfilerFailed(f"an engine's profiler said {line!r}, not {READY!r}", "output", line)

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def measurement(self) -> Measurement:
        return measurement_of(json.loads(self._line()))

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            said = "an engine's profiler ended early; what it wrote to stderr says why"
            raise ProfilerFailed(said, "output", line)
        return line.rstrip("\n")
