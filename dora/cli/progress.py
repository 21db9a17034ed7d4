"""A progress bar for long commands: on stderr, only on a terminal, and only once a second has passed."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

PATIENCE_S: Final = 1.0


@contextmanager
def progress_bar(console: Console, title: str, patience_s: float = PATIENCE_S) -> Iterator[Callable[[float], None]]:
    """Yields what is to be told the share done, 0 to 1. The bar disappears at the end."""
    if not console.is_terminal:
        yield lambda share: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task(title, total=1.0)
    shown_after_s = time.monotonic() + patience_s

    def tell(share: float) -> None:
        if not bar.live.is_started and time.monotonic() >= shown_after_s:
            bar.start()
        bar.update(task, completed=share)

    try:
        yield tell
    finally:
        bar.stop()
