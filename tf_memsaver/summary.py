"""What a result says of itself in a few lines: its ``repr``, and a small table in a notebook.

Not here: the tables of the command line (``display``).
"""

from __future__ import annotations

import html
from collections.abc import Sequence

MOST_LINES = 10
"""Lines of a ``repr``, the title among them."""

_WIDTH = 100
"""Characters of a line."""

Rows = Sequence[tuple[str, str]]
"""What is said, and of what: (name, text)."""


class Summarized:
    """Base of what is shown by a title and at most nine named lines; a subclass has a ``summary``.

    A dataclass that has this base must be made with ``repr=False``: it would get a ``repr`` of all its fields.
    """

    __slots__ = ()

    def summary(self) -> tuple[str, Rows]:
        """Return a title, and rows of a name and a text."""
        raise NotImplementedError

    def __repr__(self) -> str:
        title, rows = self.summary()
        width = max((len(name) for name, _ in rows), default=0)
        lines = [title, *(f"  {name:<{width}}  {text}" for name, text in rows[: MOST_LINES - 1])]
        return "\n".join(shortened(" ".join(line.split("\n")), _WIDTH) for line in lines)

    def _repr_html_(self) -> str:
        """Return the same as a table of HTML, for notebooks."""
        title, rows = self.summary()
        cells = "".join(
            f'<tr><td style="text-align:left">{html.escape(name)}</td>'
            f'<td style="text-align:left">{html.escape(text)}</td></tr>'
            for name, text in rows[: MOST_LINES - 1]
        )
        return f'<table><caption style="text-align:left">{html.escape(title)}</caption>{cells}</table>'


def shortened(text: str, width: int) -> str:
    """Return a text of at most ``width`` characters: from a longer one the middle is left out, and ``…`` put there."""
    if len(text) <= width:
        return text
    kept = max(width, 1) - 1
    head = (kept + 1) // 2
    return f"{text[:head]}…{text[len(text) - (kept - head) :]}"
