"""A host whose clock is off: ``python -m tests.prometheus.clock_of_host FILE PYTHON -m dora host ...``.

FILE holds by how much, as of ``tests.chaos.clock``. The agent's workers have the same clock.
"""

import runpy
import sys
import time
from pathlib import Path
from typing import Any

import dora.host.runtime
from tests.chaos.clock import jumping

if __name__ == "__main__":
    _, file, _, module, name, *arguments = sys.argv
    assert module == "-m"
    runtime: Any = dora.host.runtime
    worker_argv = runtime.worker_argv
    runtime.worker_argv = lambda *given: ["-m", "tests.chaos.clock", file, *worker_argv(*given)]
    time.time = jumping(Path(file), time.time)
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)
