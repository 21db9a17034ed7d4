"""Output of a running demo: a live view on a terminal, otherwise a line per notable event."""

import time
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live

from dora.ops.view.live import service_view
from dora.ops.view.narration import Narrator
from dora.rpc.dora_pb2 import Status


class Screen(Protocol):
    """The demo's output. Use it with ``with``: the live view ends before anything else is printed."""

    def line(self, text: str) -> None:
        """Prints one line."""

    def show(self, status: Status, *, last: bool = False) -> None:
        """Shows the service's current state; the ``last`` one is always shown."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def screen_for(console: Console, title: str, steps_planned: int) -> Screen:
    return LiveScreen(console, title, steps_planned) if console.is_terminal else PlainScreen(console)


class PlainScreen:
    """Lines with the seconds since the start, at most one batch every few seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._narrator = Narrator()
        self._started_s = time.monotonic()

    def line(self, text: str) -> None:
        self._console.print(f"{time.monotonic() - self._started_s:7.1f} s  {text}", markup=False, soft_wrap=True)

    def show(self, status: Status, *, last: bool = False) -> None:
        for text in self._narrator.tell(status, time.monotonic(), last=last):
            self.line(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class LiveScreen:
    """A panel that is redrawn with every status. Lines scroll above it."""

    def __init__(self, console: Console, title: str, steps_planned: int) -> None:
        self._live = Live(console=console, auto_refresh=False)
        self._title = title
        self._steps_planned = steps_planned

    def line(self, text: str) -> None:
        self._live.console.print(text, markup=False, style="dim")

    def show(self, status: Status, *, last: bool = False) -> None:
        self._live.update(service_view(status, self._title, self._steps_planned), refresh=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
