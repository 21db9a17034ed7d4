"""A run of DORA for ``perf/peers.py``: its service, and its reference trainer in a process of its own.

python -m perf.peer_dora FOLDER balance.policy=laxity window.size=2
"""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from dora.ops.demo.folder import OutFolder
from dora.ops.demo.options import DemoOptions
from dora.ops.demo.run import run_demo
from dora.ops.demo.screen import PlainScreen
from perf.peer_record import CONTEXT_TOKENS, Task, read_task

WORKERS = 2


def options_of(task: Task, folder: Path, settings: Sequence[str]) -> DemoOptions:
    """``tiny`` is the model of ``model_of``."""
    own = (
        f"workers.slots={task.slots // WORKERS}",
        f"workers.max_model_len_tokens={CONTEXT_TOKENS}",
    )
    return DemoOptions(
        model="tiny",
        out=folder,
        steps=task.steps,
        groups=task.groups,
        group_size=task.group_size,
        workers=WORKERS,
        max_tokens=task.longest_tokens,
        learning_rate=task.learning_rate,
        seed=task.seed,
        evaluate_every=0,
        settings=(*own, *settings),
    )


async def run(folder: Path, settings: Sequence[str]) -> None:
    task = read_task(folder)
    async with asyncio.timeout(task.limit_s):
        await run_demo(options_of(task, folder, settings), OutFolder(folder), PlainScreen(Console()))


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1]), sys.argv[2:]))
