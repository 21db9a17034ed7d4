"""Tables for people. Their columns describe themselves, and ``docs/reference/`` has the same words.

A table adapts to the available width. In a narrow terminal it first drops its frame, then the columns of the highest
rank; long words are abbreviated. No word is broken and no number is cut.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, Literal, TypeVar

from rich.box import HEAVY_HEAD, SIMPLE_HEAD, Box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

Row = TypeVar("Row")
VERSION_STYLES: Final = tuple(
    f"bold white on {name}" for name in ("blue", "orange4", "green4", "purple4", "turquoise4")
)  # none is red, which means lost
NOTE_WIDTH: Final = 100  # characters: longer lines are hard to read
WIDEST: Final = 1 << 16  # for a note limited only by the terminal
WORD_WIDTH: Final = 24  # columns of words are abbreviated to this before a column is left out
WORD_MIN: Final = 6
ELLIPSIS: Final = "…"


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """A column: its heading, its meaning, and its cell of a row. Words are aligned left, numbers right.

    A column of ``rank`` 0 is always shown. If there is no room for all, those of the highest rank are left out first.
    """

    heading: str
    meaning: str
    cell: Callable[[Row], str | Text]
    words: bool = False
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Look:
    """The style of a table. ``gap`` counts characters between columns, ``edge`` those of both edges together."""

    box: Box | None
    padding: tuple[int, int, int, int]
    gap: int
    edge: int

    def table(self) -> Table:
        framed = self.edge > 0
        return Table(box=self.box, padding=self.padding, show_edge=framed, pad_edge=framed, header_style="bold")


FRAMED: Final = Look(HEAVY_HEAD, (0, 1, 0, 1), gap=3, edge=4)
SHEET: Final = Look(SIMPLE_HEAD, (0, 1, 0, 0), gap=2, edge=0)
PLAIN: Final = Look(None, (0, 2, 0, 0), gap=2, edge=0)


@dataclass(slots=True)
class Sheet(Generic[Row]):
    """Rows under headings, adapted to the available width.

    It uses the first of ``looks`` with room for all columns, otherwise the last. ``headings`` override the columns'
    own. ``notes`` are sentences below the table; with ``tell``, another one lists the columns that were left out.
    """

    columns: Sequence[Column[Row]]
    rows: Sequence[Row]
    title: str | Text = ""
    looks: Sequence[Look] = (FRAMED, SHEET)
    headings: Sequence[str] = ()
    notes: Sequence[str] = ()
    style: Callable[[Row], str] = lambda row: ""
    tell: bool = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_width
        headings = self.headings or [column.heading for column in self.columns]
        cells = [[column.cell(row) for column in self.columns] for row in self.rows]
        widths = [max(_width(part) for part in parts) for parts in zip(headings, *cells, strict=True)]
        look, shown = self._fitted(widths, room)
        least = [_width(headings[at]) if self.columns[at].words else widths[at] for at in shown]
        most = _word_width([widths[at] for at in shown], least, look, room)
        table = look.table()
        for at in shown:
            justify: Literal["left", "right"] = "left" if self.columns[at].words else "right"
            table.add_column(headings[at], justify=justify, no_wrap=True, vertical="bottom")
        limits = [
            max(most, _width(heading)) if column.words else 0
            for column, heading in zip(self.columns, headings, strict=True)
        ]
        for row, parts in zip(self.rows, cells, strict=True):
            found = (abbreviated(parts[at], limits[at]) if limits[at] else parts[at] for at in shown)
            table.add_row(*found, style=self.style(row))
        if self.title:
            yield Note(self.title, "bold")
        yield table
        if not self.rows:
            yield Note("none", "dim")
        left_out = [in_a_line(heading) for at, heading in enumerate(headings) if at not in shown]
        if left_out and self.tell:
            yield Note(f"A wider terminal also shows: {', '.join(left_out)}.", "dim")
        for note in self.notes:
            yield Note(note, "dim")

    def _fitted(self, widths: Sequence[int], room: int) -> tuple[Look, list[int]]:
        every = list(range(len(widths)))
        for look in self.looks:
            if _total([widths[at] for at in every], look) <= room:
                return look, every
        look, shown = self.looks[-1], every
        least = [min(width, WORD_WIDTH) if self.columns[at].words else width for at, width in enumerate(widths)]
        for at in sorted(every, key=lambda at: (-self.columns[at].rank, -at)):
            if _total([least[each] for each in shown], look) <= room or not self.columns[at].rank:
                break
            shown = [each for each in shown if each != at]
        return look, shown


@dataclass(slots=True)
class Facts:
    """Rows of a name and a value, added by the caller. Long values are wrapped at words."""

    title: str | Text = ""
    notes: list[str] = field(default_factory=list)
    _rows: list[tuple[str | Text, str | Text, str] | None] = field(default_factory=list)  # None: between sections

    def add_row(self, name: str | Text, value: str | Text, meaning: str = "") -> None:
        """Adds a row. ``meaning`` follows the value if the terminal is wide enough."""
        self._rows.append((name, value, meaning))

    def add_section(self) -> None:
        self._rows.append(None)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_width - FRAMED.gap - FRAMED.edge
        table = Table(show_header=False)
        names = [row[0] for row in self._rows if row is not None]
        name_width = min(max(map(_width, names), default=0), max(room // 2, WORD_MIN))
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        for row in self._rows:
            if row is None:
                table.add_section()
            else:
                name, value, meaning = row
                value_width = max(room - name_width, WORD_MIN)
                shown = short_words(value, value_width)
                if meaning and shown.cell_len + FRAMED.gap + cell_len(meaning) <= value_width:
                    shown = Text.assemble(shown, " " * FRAMED.gap, (meaning, "dim"))
                table.add_row(abbreviated(name, name_width), shown)
        if self.title:
            yield Note(self.title, "bold")
        yield table
        for note in self.notes:
            yield Note(note, "dim")


@dataclass(frozen=True, slots=True)
class Note:
    """A text below or above a table, wrapped at words to at most ``NOTE_WIDTH``; ``indent`` from the second line."""

    text: str | Text
    style: str = ""
    indent: int = 0
    widest: int = NOTE_WIDTH

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(self.widest, options.max_width)
        text = self.text.copy() if isinstance(self.text, Text) else Text(self.text)
        text.stylize_before(self.style)
        for line in text.split("\n", allow_blank=True):
            yield from _lines(short_words(line, width - self.indent), console, width, self.indent)


def _lines(text: Text, console: Console, width: int, indent: int) -> Iterator[Text]:
    first, *rest = text.wrap(console, width)
    yield first
    if rest:
        remaining = text[len(first.plain) :]
        remaining = remaining[len(remaining.plain) - len(remaining.plain.lstrip()) :]
        for line in remaining.wrap(console, width - indent):
            yield Text.assemble(" " * indent, line)


def abbreviated(cell: str | Text, width: int) -> Text:
    """Abbreviates a cell to at most ``width`` characters, replacing its middle."""
    text = cell if isinstance(cell, Text) else Text(cell)
    if text.cell_len <= width:
        return text
    kept = max(width - cell_len(ELLIPSIS), 2)
    while kept > 2 and text[: kept - kept // 2].cell_len + text[len(text) - kept // 2 :].cell_len + 1 > width:
        kept -= 1  # characters that are two cells wide
    return Text.assemble(text[: kept - kept // 2], ELLIPSIS, text[len(text) - kept // 2 :])


def short_words(cell: str | Text, width: int) -> Text:
    """Abbreviates the words that are longer than a line of ``width``, which cannot be wrapped."""
    text = cell if isinstance(cell, Text) else Text(cell)
    if all(cell_len(word) <= width for word in text.plain.split()):
        return text
    parts, at = [], 0
    for word in text.plain.split():
        begin = text.plain.index(word, at)
        parts += [text[at:begin], abbreviated(text[begin : begin + len(word)], width)]
        at = begin + len(word)
    return Text.assemble(*parts, text[at:])


def in_a_line(heading: str) -> str:
    return heading.replace("/\n", "/").replace("\n", " ")


def version_cell(version: int, suffix: str = "") -> Text:
    """A version as a coloured cell. Adjacent versions have different colours."""
    return Text.assemble((f" v{version} ", VERSION_STYLES[version % len(VERSION_STYLES)]), suffix)


def _width(cell: str | Text) -> int:
    plain = cell.plain if isinstance(cell, Text) else cell
    return max((cell_len(line) for line in plain.split("\n")), default=0)


def _total(widths: Sequence[int], look: Look) -> int:
    return sum(widths) + look.gap * (len(widths) - 1) + look.edge


def _word_width(widths: Sequence[int], least: Sequence[int], look: Look, room: int) -> int:
    for most in range(max(widths, default=0), WORD_MIN, -1):
        if _total([max(min(width, most), needed) for width, needed in zip(widths, least, strict=True)], look) <= room:
            return most
    return WORD_MIN
