"""Progress of long work on stderr: on a terminal a line that moves, elsewhere plain lines now and then."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from tf_memsaver.pace import heard_by

LONG = 2.0
"""Seconds from which on a stage is worth a line of its own on a terminal."""

_BETWEEN_LINES = 10.0
"""Seconds between two lines about one stage where there is no terminal."""


class Progress:
    """Names the stages of a command as they run, on the given console, and how far loops in them are."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextlib.contextmanager
    def stage(self, what: str) -> Iterator[None]:
        """Show ``what`` while the block runs, how far it is, and how long it took when it is done."""
        line = _Line(what)
        if self._console.is_terminal:
            with self._console.status(line), heard_by(line.hear):
                yield
        else:
            self.note(f"{what} …")
            with heard_by(lambda *told: self._now_and_then(line, *told)):
                yield
        if line.seconds >= LONG or not self._console.is_terminal:
            self.note(f"{what}: {line.seconds:.1f} s")

    def note(self, text: str) -> None:
        """Show one line."""
        self._console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)

    def _now_and_then(self, line: _Line, what: str, done: int, total: int) -> None:
        line.hear(what, done, total)
        if line.seconds - line.shown_at >= _BETWEEN_LINES:
            line.shown_at = line.seconds
            self.note(str(line))


class _Line:
    """What a stage does, how far its present loop is, and how much longer that takes at its pace so far."""

    def __init__(self, what: str) -> None:
        self._what, self._begun = what, time.perf_counter()
        self.shown_at = 0.0
        self._loop, self._done, self._total = "", 0, 0
        self._first_at, self._at = 0.0, 0.0

    @property
    def seconds(self) -> float:
        """Seconds since the stage began."""
        return time.perf_counter() - self._begun

    def hear(self, loop: str, done: int, total: int) -> None:
        """Take down how far a loop is."""
        if (loop, done, total) == (self._loop, self._done, self._total):
            return
        if done <= 1 or loop != self._loop:
            # The first part of a loop may take much longer than the others, such as a step that is traced.
            self._first_at = self.seconds
        self._loop, self._done, self._total, self._at = loop, done, total, self.seconds

    def __str__(self) -> str:
        line, left = f"{self._what} … {_in_words(self.seconds)}", self._left()
        if self._done >= self._total:
            return line
        # A stage may have several loops: the time that is left is this one's.
        said = "" if left is None else f"{_in_words(left)} left, "
        return f"{line} ({self._loop}: {said}{self._done} of {self._total})"

    def __rich__(self) -> Text:
        return Text(str(self), no_wrap=True, overflow="ellipsis")

    def _left(self) -> float | None:
        """Return the seconds until the loop is done, None where too little of it was heard."""
        if not 1 < self._done < self._total:
            return None
        each = (self._at - self._first_at) / (self._done - 1)
        return max(0.0, each * (self._total - self._done) - (self.seconds - self._at))


def _in_words(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
