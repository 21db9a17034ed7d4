"""Tables for people, made of columns that say what they mean; ``docs/reference.md`` has the same words."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

Row = TypeVar("Row")
VERSION_STYLES = tuple(f"bold white on {name}" for name in ("blue", "dark_orange3", "green4", "purple4", "deep_pink4"))


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """One column: its heading, what it means, and its cell of a row. Words stand at the left, numbers at the right."""

    heading: str
    meaning: str
    cell: Callable[[Row], str | Text]
    words: bool = False


def table_of(title: str | None, columns: Sequence[Column[Row]], rows: Iterable[Row], **style: Any) -> Table:
    """The rows under their headings; ``style`` as rich's Table takes it."""
    table = Table(title=title, title_justify="left", header_style="bold", **style)
    for column in columns:
        table.add_column(column.heading, justify="left" if column.words else "right", overflow="fold")
    for row in rows:
        table.add_row(*(column.cell(row) for column in columns))
    return table


def facts_table(title: str | Text) -> Table:
    """For rows of a name and a value, added by the caller; long values are folded."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column("what", style="bold")
    table.add_column("value", overflow="fold")
    return table


def sheet(headings: Iterable[str], *, words: int = 1) -> Table:
    """For many numbers side by side: no frame, no cell cut. The first ``words`` columns stand at the left."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place < words else "right", no_wrap=True, vertical="bottom")
    return table


def version_cell(version: int, suffix: str = "") -> Text:
    """A version as a coloured cell; neighbouring versions never share a colour."""
    return Text.assemble((f" v{version} ", VERSION_STYLES[version % len(VERSION_STYLES)]), suffix)
