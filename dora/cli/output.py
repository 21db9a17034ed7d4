"""Where text goes: results to stdout, everything else to stderr; one JSON document on stdout with ``--json``."""

import json
import sys
from typing import Any

from google.protobuf.message import Message
from rich.console import Console, RenderableType

from dora.rpc.dora_pb2 import OperatorReply

WIDEST_CHARACTERS = 400
PIPED_WIDTH_CHARACTERS = 160  # a pipe has no width of its own; tables must not be cut for it


def stdout() -> Console:
    """A console on the present stdout (made on demand: tests replace the stream)."""
    return _console(stderr=False)


def stderr() -> Console:
    """A console on the present stderr."""
    return _console(stderr=True)


def print_json(tree: object) -> None:
    """Prints ``tree`` as the command's one JSON document."""
    sys.stdout.write(json.dumps(tree, indent=2) + "\n")


def print_whole(console: Console, table: RenderableType) -> None:
    """Prints a wide table. In a narrow terminal lines wrap: a number that is cut short would say something else."""
    options = console.options.update(max_width=WIDEST_CHARACTERS)
    console.width = max(console.width, console.measure(table, options=options).maximum)
    console.print(table)


def print_reply(reply: OperatorReply, as_json: bool) -> None:
    """Prints what the service says it has begun."""
    if as_json:
        print_json(plain(reply))
    else:
        sys.stdout.write(reply.message + "\n")


def plain(message: Message) -> dict[str, object]:
    """A protobuf message as JSON values, every field present, 64-bit numbers as numbers (protobuf's own makes strings).

    An optional field that is not set is None. ``message`` must hold no ``bytes`` field.
    """
    return {field.name: _plain_field(message, field) for field in message.DESCRIPTOR.fields}


def _plain_field(message: Message, field: Any) -> object:
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
    return Console(stderr=stderr, highlight=False, width=None if stream.isatty() else PIPED_WIDTH_CHARACTERS)
