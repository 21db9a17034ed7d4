"""Output: results on stdout, everything else on stderr; with ``--json``, one JSON document on stdout."""

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

from rich.console import Console, RenderableType

from dora.ops.view.numbers import duration

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from dora.rpc.dora_pb2 import OperatorReply

PATIENCE_S: Final = 1.0
LINES_S: Final = 10.0  # between two progress lines without a terminal
PIPED_WIDTH_CHARACTERS = 400  # a pipe has no width unless COLUMNS is set, so allow for every column


class Tell(Protocol):
    """Progress callback: takes the share done, 0 to 1, and a text that describes it."""

    def __call__(self, share: float, how_far: str = "", /) -> None: ...


def stdout() -> Console:
    """A console on the current stdout. It is made on demand, because tests replace the stream."""
    return _console(stderr=False)


def stderr() -> Console:
    return _console(stderr=True)


def print_json(tree: object) -> None:
    sys.stdout.write(json_text(tree, indent=2) + "\n")


def json_text(tree: object, indent: int | None = None) -> str:
    """Returns ``tree`` as JSON. NaN and infinity become null."""
    try:
        return json.dumps(tree, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(tree), indent=indent, allow_nan=False)


def _finite(tree: object) -> object:
    if isinstance(tree, float):
        return tree if math.isfinite(tree) else None
    if isinstance(tree, Mapping):
        return {name: _finite(part) for name, part in tree.items()}
    return [_finite(part) for part in tree] if isinstance(tree, list | tuple) else tree


def print_result(tree: object, shown: RenderableType, as_json: bool) -> None:
    if as_json:
        print_json(tree)
    else:
        stdout().print(shown)


def print_reply(reply: "OperatorReply", as_json: bool) -> None:
    if as_json:
        print_json(plain(reply))
    else:
        sys.stdout.write(reply.message + "\n")


@contextmanager
def progress_bar(console: Console, title: str, patience_s: float = PATIENCE_S) -> Iterator["Tell"]:
    """Yields a progress callback.

    On a terminal, a bar appears after ``patience_s`` and disappears at the end. Elsewhere, a line is printed every
    ``LINES_S`` seconds.
    """
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task(title, total=1.0)
    shown_after_s = time.monotonic() + (patience_s if console.is_terminal else LINES_S)

    def tell(share: float, how_far: str = "") -> None:
        nonlocal shown_after_s
        bar.update(task, completed=share, description=f"{title}: {how_far}" if how_far else title)
        if time.monotonic() < shown_after_s:
            return
        if console.is_terminal:
            bar.start()
        else:
            shown_after_s += LINES_S
            left_s = bar.tasks[task].time_remaining
            left = f", {duration(left_s)} left" if left_s is not None else ""
            said = f"dora: {title}: {share:.0%}{f' ({how_far})' if how_far else ''}{left}"
            console.print(said, markup=False, soft_wrap=True)

    try:
        yield tell
    finally:
        if bar.live.is_started:  # otherwise it prints an empty line
            bar.stop()


def plain(message: "Message") -> dict[str, object]:
    """Converts a protobuf message to JSON values: all fields present, 64-bit numbers as numbers (protobuf writes
    strings).

    An unset optional field is None. ``message`` must hold no ``bytes`` field.
    """
    return {field.name: _plain_field(message, field) for field in message.DESCRIPTOR.fields}


def _plain_field(message: "Message", field: Any) -> object:
    value, entry = getattr(message, field.name), field.message_type
    if entry is None:
        if field.has_presence and not message.HasField(field.name):
            return None
        return list(value) if field.is_repeated else value
    if entry.GetOptions().map_entry:
        return dict(sorted(value.items()))
    return [plain(part) for part in value] if field.is_repeated else plain(value)


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    known = stream.isatty() or "COLUMNS" in os.environ
    return Console(stderr=stderr, highlight=False, width=None if known else PIPED_WIDTH_CHARACTERS)
