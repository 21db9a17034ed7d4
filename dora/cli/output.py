"""Where text goes: results to stdout, everything else to stderr; one JSON document on stdout with ``--json``."""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console, RenderableType

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from dora.rpc.dora_pb2 import OperatorReply

PATIENCE_S: Final = 1.0
PIPED_WIDTH_CHARACTERS = 400  # a pipe has no width of its own, unless COLUMNS says one: every column has room


def stdout() -> Console:
    """A console on the present stdout (made on demand: tests replace the stream)."""
    return _console(stderr=False)


def stderr() -> Console:
    """A console on the present stderr."""
    return _console(stderr=True)


def print_json(tree: object) -> None:
    """Prints ``tree`` as the command's one JSON document."""
    sys.stdout.write(json_text(tree, indent=2) + "\n")


def json_text(tree: object, indent: int | None = None) -> str:
    """``tree`` as JSON, which has no NaN and no infinity: null stands for them."""
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
    """Prints the command's result: ``tree`` for programs, ``shown`` for people."""
    if as_json:
        print_json(tree)
    else:
        stdout().print(shown)


def print_reply(reply: "OperatorReply", as_json: bool) -> None:
    """Prints what the service says it has begun."""
    if as_json:
        print_json(plain(reply))
    else:
        sys.stdout.write(reply.message + "\n")


@contextmanager
def progress_bar(console: Console, title: str, patience_s: float = PATIENCE_S) -> Iterator[Callable[[float], None]]:
    """Yields what is to be told the share done, 0 to 1.

    The bar shows only on a terminal and only once ``patience_s`` have passed; it disappears at the end.
    """
    if not console.is_terminal:
        yield lambda share: None
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

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


def plain(message: "Message") -> dict[str, object]:
    """A protobuf message as JSON values, every field present, 64-bit numbers as numbers (protobuf's own makes strings).

    An optional field that is not set is None. ``message`` must hold no ``bytes`` field.
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
