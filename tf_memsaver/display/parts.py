"""What tables are made of: texts as they are, names that are shortened in the middle, bars, and the table itself."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.style import StyleType
from rich.table import Table
from rich.text import Text

from tf_memsaver.summary import shortened

DATA_IN_MEMORY = "data in memory"

NOW, PLANNED, COST, MINOR = "red", "green", "yellow", "dim"
"""What colours mean: memory of the plain step, what a plan makes of it, what it costs, and what matters less."""

GOOD, BAD = "bold green", "bold red"
"""Verdicts."""

BAR_WIDTH = 20
"""Cells of a bar that stands for all."""

_LEAST_NAME = 10
"""Characters of a name that a narrow terminal leaves."""

_EIGHTHS = " ▏▎▍▌▋▊▉"


class Name:
    """A name on one line: where a column is too narrow for it, its middle is left out."""

    def __init__(self, name: str, style: str = "") -> None:
        self._text = verbatim(name, style)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = self._text.copy()
        text.plain = shortened(text.plain, options.max_width)
        text.no_wrap, text.overflow = True, "crop"
        yield text

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        width = min(len(self._text), options.max_width)
        return Measurement(min(width, _LEAST_NAME), width)


class Rows(Table):
    """A table without a frame. Texts are shown as they are: names come from models and files."""

    def __init__(self, title: str = "") -> None:
        # Rich would break them where the table ends.
        self._above, self._below = verbatim(title, "bold"), Text()
        super().__init__(
            header_style="bold",
            box=None,
            pad_edge=False,
            padding=(0, 2, 0, 0),
        )

    def add_name(self, heading: str) -> None:
        """Add a column of names."""
        self.add_column(heading)

    def add_figures(self, *headings: str) -> None:
        """Add columns of figures, which are never broken."""
        for heading in headings:
            self.add_column(heading, justify="right", no_wrap=True)

    def add_bars(self) -> None:
        """Add a column of bars."""
        self.add_column("", no_wrap=True)

    def add_row(self, *cells: RenderableType | None, style: StyleType | None = None, end_section: bool = False) -> None:
        """Add a row; texts of the first column are names."""
        shown = [
            (Name(cell) if place == 0 else verbatim(cell)) if isinstance(cell, str) else cell
            for place, cell in enumerate(cells)
        ]
        super().add_row(*shown, style=style, end_section=end_section)

    def set_caption(self, text: str) -> None:
        """Show a text below the table."""
        self._below = verbatim(text, MINOR)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._above:
            yield self._above
        yield from super().__rich_console__(console, options)
        if self._below:
            yield self._below


def verbatim(text: str, style: str = "") -> Text:
    """Return a text without markup, and with what no terminal should be sent written as an escape."""
    plain = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return Text("".join(plain), style=style)


def bar(value: float, of: float, style: str) -> Text:
    """Return a bar as long as ``value`` is of ``of``: ``BAR_WIDTH`` cells for all of it, and never more."""
    share = min(1.0, value / of) if of > 0 else 0.0
    full, rest = divmod(max(round(8 * BAR_WIDTH * share), int(share > 0)), 8)
    return Text("█" * full + _EIGHTHS[rest].strip(), style=style)


def bar_of_two(first: float, second: float, of: float, styles: Sequence[str]) -> Text:
    """Return a bar of two parts, full and shaded, in whole cells; both together are as long as their sum is of ``of``.

    What is not nothing has a cell at least.
    """
    cells = max(1, round(BAR_WIDTH * (first + second) / of)) if of > 0 and first + second > 0 else 0
    part = round(cells * first / (first + second)) if cells else 0
    return Text.assemble(("█" * part, styles[0]), ("░" * (cells - part), styles[1]))


def share_of(value: float, of: float) -> str:
    """Return a share in per cent; a dash where there is nothing to share."""
    return f"{value / of:.0%}" if of else "–"
