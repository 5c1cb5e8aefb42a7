"""Tables and text that fit the terminal: nothing breaks inside a number, a name, a moment or a digest.

A table that is too wide first gets narrower columns of text, then less space between columns. If that is not enough,
only its first columns stay side by side, and the others follow below each line as `name: value`. So every value is
there at every width, and whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

WIDE = 1000
"""The width of an output that is not a terminal. No line is wrapped there, so that `grep` and `awk` work."""
TEXT_WIDTH = 24
"""A column of text is not made narrower than this, if it has so much to say."""
INDENT = 4
_GAP = 2
_UNITS = "[KMGTP]iB|B|ms|s|min|h|d"
_WHOLE = re.compile(rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d\S*|\$?[\d,.]+ (?:{_UNITS})\b\S*|\S+")
"""What stays on one line: a moment, a number with its unit, a word."""


def wrapped(text: Text, width: int, indent: int = 0) -> list[Text]:
    """Break a text at spaces into lines of this width. Lines after the first are indented. A word is never broken."""
    lines: list[Text] = []
    for line in text.split("\n", allow_blank=True):
        start, end, room = 0, 0, width
        for found in _WHOLE.finditer(line.plain):
            if Text(line.plain[start : found.end()]).cell_len > room and end > start:
                lines.append(_line(line, start, end, lines_before=start > 0, indent=indent))
                start, room = found.start(), width - indent
            end = found.end()
        lines.append(_line(line, start, end, lines_before=start > 0, indent=indent))
    return lines


def _line(line: Text, start: int, end: int, *, lines_before: bool, indent: int) -> Text:
    part = line[start:end]
    if lines_before and indent:
        part = Text.assemble(" " * indent, part)
    part.no_wrap, part.overflow, part.end = True, "ignore", "\n"
    return part


@dataclass(frozen=True, slots=True)
class Flow:
    """A text whose lines are broken at spaces. What is broken off is indented by `hang`, or like its line."""

    text: Text
    hang: int = 0

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.text.split("\n", allow_blank=True):
            indent = self.hang or len(line.plain) - len(line.plain.lstrip(" ")) + _GAP
            yield from wrapped(line, WIDE * WIDE if options.max_width >= WIDE else options.max_width, indent)


def fitting(renderable: RenderableType) -> RenderableType:
    """Text that breaks only at spaces; anything else as it is."""
    if isinstance(renderable, str):
        return Flow(Text(renderable))
    return Flow(renderable) if isinstance(renderable, Text) else renderable


@dataclass
class _Row:
    cells: list[Text]
    style: str
    ends_section: bool = False


@dataclass
class Fitted:
    """A table. Columns whose names are in `right` are numbers: right-aligned, and never broken."""

    columns: Sequence[str]
    right: frozenset[str] = frozenset()
    title: str | None = None
    rows: list[_Row] = field(default_factory=list)

    def add_row(self, *cells: str | Text, style: str | None = None) -> None:
        """Add a row. Text is taken as it is: brackets in a name are no markup."""
        texts = [Text(cell) if isinstance(cell, str) else cell for cell in cells]
        self.rows.append(_Row(texts + [Text()] * (len(self.columns) - len(texts)), style or ""))

    def add_section(self) -> None:
        """Draw a line below the rows so far."""
        if self.rows:
            self.rows[-1].ends_section = True

    def __rich_measure__(self, _console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(options.max_width, 1), options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        most = [self._widest(place) for place in range(len(self.columns))]
        is_unbounded = options.max_width >= WIDE
        for collapse in (False, True):
            around = 2 * len(most) if collapse else 3 * len(most) - 1
            if is_unbounded or sum(most) + around <= options.max_width:
                whole = self._table(most, collapse)
                yield from console.render(whole, options.update(width=max(options.max_width, sum(most) + around)))
                return
            widths = _shared(most, [self._least(place) for place in range(len(most))], options.max_width - around)
            if widths:
                yield from console.render(self._table(widths, collapse), options)
                return
        yield from self._stacked(options.max_width)

    def _cells(self, place: int) -> Iterator[Text]:
        yield Text(self.columns[place])
        yield from (row.cells[place] for row in self.rows)

    def _widest(self, place: int) -> int:
        return max(line.cell_len for cell in self._cells(place) for line in cell.split("\n", allow_blank=True))

    def _least(self, place: int) -> int:
        """How narrow the column can be: numbers stay whole, text breaks at spaces."""
        widest = self._widest(place)
        if self.columns[place] in self.right:
            return widest
        words = (Text(word).cell_len for cell in self._cells(place) for word in _WHOLE.findall(cell.plain))
        return max(min(widest, TEXT_WIDTH), *words, 0)

    def _table(self, widths: Sequence[int], collapse: bool) -> Table:
        table = Table(
            box=box.SIMPLE_HEAD, title=self.title, title_justify="left", title_style="bold", pad_edge=False,
            collapse_padding=collapse,
        )  # fmt: skip
        for name, width in zip(self.columns, widths, strict=True):
            table.add_column(Text(name), justify="right" if name in self.right else "left", width=width, no_wrap=True)
        for row in self.rows:
            cells = [_lines(cell, width) for cell, width in zip(row.cells, widths, strict=True)]
            table.add_row(*cells, style=row.style, end_section=row.ends_section)
        return table

    def _stacked(self, width: int) -> Iterator[RenderableType]:
        """The first columns side by side, and the others below them."""
        least = [self._least(place) for place in range(len(self.columns))]
        shown = 0
        while shown < len(least) and 1 + sum(least[: shown + 1]) + _GAP * shown <= width:
            shown += 1
        if shown < 2:  # the first cell is a heading
            shown, least[0] = 1, min(least[0], max(width - 1, 1))
        if self.title:
            yield _styled(Text(self.title), "bold")
        head = [Text(name) for name in self.columns[:shown]]
        yield _styled(self._beside(head, least), "bold")
        yield Text(" " + "─" * (sum(least[:shown]) + _GAP * (shown - 1)), no_wrap=True, overflow="ignore")
        for row in self.rows:
            if shown > 1 or row.cells[0].plain:
                yield from (_styled(line, row.style) for line in self._side_by_side(row.cells[:shown], least))
            rest = [place for place in range(shown, len(least)) if row.cells[place].plain]
            yield from (_styled(line, row.style) for line in _pairs(self.columns, row.cells, rest, width))
            if row.ends_section:
                yield Text("")
        yield Text("")

    def _side_by_side(self, cells: Sequence[Text], widths: Sequence[int]) -> Iterator[Text]:
        """The lines of a row, whose cells may have several lines each."""
        columns = [wrapped(cell, width or WIDE) for cell, width in zip(cells, widths, strict=False)]
        for place in range(max(map(len, columns))):
            yield self._beside([column[place] if place < len(column) else Text() for column in columns], widths)

    def _beside(self, cells: Sequence[Text], widths: Sequence[int]) -> Text:
        line = Text(" ", no_wrap=True, overflow="ignore")
        for place, (cell, width) in enumerate(zip(cells, widths, strict=False)):
            space = " " * (width - cell.cell_len)
            line.append(" " * _GAP if place else "")
            is_number = self.columns[place] in self.right
            for part in (space, cell) if is_number else (cell, space):
                line.append(part)
        return line


def _pairs(names: Sequence[str], cells: Sequence[Text], places: Sequence[int], width: int) -> Iterator[Text]:
    """Cells as `name: value`, as many on a line as fit. A cell of several lines gets them all, indented."""
    line = Text()
    for place in places:
        value, *more = cells[place].split("\n", allow_blank=True)
        pair = Text.assemble((f"{names[place]}: " if names[place] else "", "dim"), value)
        if line.cell_len and (more or INDENT + line.cell_len + 3 + pair.cell_len > width):
            yield from _indented(line, width)
            line = Text()
        line = Text.assemble(line, "   " if line.cell_len else "", pair)
        if more:
            for one in (line, *more):
                yield from _indented(one, width)
            line = Text()
    if line.cell_len:
        yield from _indented(line, width)


def _indented(line: Text, width: int) -> list[Text]:
    return wrapped(Text.assemble(" " * INDENT, line), width, INDENT + _GAP)


def _shared(most: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Widths between `least` and `most` that fill the room; none if there is not enough of it."""
    if sum(least) > room:
        return []
    widths, left = list(least), room - sum(least)
    for place in sorted(range(len(most)), key=lambda place: most[place] - least[place]):
        wanting = sum(1 for other, width in enumerate(widths) if width < most[other])
        more = min(most[place] - widths[place], left // max(wanting, 1))
        widths[place] += more
        left -= more
    return widths


def _lines(cell: Text, width: int) -> Text:
    """A cell with its line breaks in it, so that rich breaks none."""
    joined = Text("\n", end="").join(_bare(line) for line in wrapped(cell, width))
    joined.no_wrap = True
    return joined


def _bare(line: Text) -> Text:
    line.end = ""
    return line


def _styled(text: Text, style: str) -> Text:
    if style:
        text.stylize_before(style)
    text.no_wrap, text.overflow = True, "ignore"
    return text
