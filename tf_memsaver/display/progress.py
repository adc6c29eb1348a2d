"""Progress of long work on stderr: a spinner on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text


class Progress:
    """Names the stages of a command as they run, on the given console."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextlib.contextmanager
    def stage(self, what: str) -> Iterator[None]:
        """Show ``what`` while the block runs, and how long it took when it is done."""
        begin = time.perf_counter()
        if self._console.is_terminal:
            with self._console.status(Text(f"{what} …")):
                yield
        else:
            self.note(f"{what} …")
            yield
        self.note(f"{what}: {time.perf_counter() - begin:.1f} s")

    def note(self, text: str) -> None:
        """Show one line."""
        self._console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)
