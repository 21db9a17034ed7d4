"""A worker that may stall: ``python -m tests.chaos.stalling -m dora.worker ...``.

After ``STALL`` it obeys and reports, and its engine yields no token.
"""

import runpy
import signal
import sys
from typing import Any, Final

ITSELF: Final = ("-m", "tests.chaos.stalling")
STALL: Final = signal.SIGRTMIN  # not one of those that a worker ignores, see dora.system.signals


def stalling_workers(module: Any) -> None:
    """The workers that ``module`` starts may stall."""
    inner = module.worker_argv
    module.worker_argv = lambda *arguments: [*ITSELF, *inner(*arguments)]


def _stall(*_: Any) -> None:
    from dora.worker.loop import EngineLoop

    EngineLoop.has_work = lambda self: False  # type: ignore[method-assign]


if __name__ == "__main__":
    signal.signal(STALL, _stall)
    assert sys.argv[1] == "-m"
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
