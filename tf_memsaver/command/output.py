"""What a command found, and standard output for it alone: what else is printed, by any means, goes to stderr."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import RenderableType


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a command found: whether the caller is satisfied, the same for programs, and for people."""

    satisfied: bool
    document: dict[str, Any]
    shown: tuple[RenderableType, ...]


@contextlib.contextmanager
def results_only(*, restore: bool) -> Iterator[TextIO]:
    """Yield the stream for results; the user's code, libraries in C and other programs print to stderr.

    ``restore`` says whether standard output is as before after the block. If not, it stays for results alone, as suits
    a process that is about to exit: what code prints then must not follow a document either.
    """
    before = sys.stdout
    before.flush()
    with contextlib.ExitStack() as stack:
        kept = _take_over()
        results = before
        if kept is not None and _descriptor(before) == 1:
            results = stack.enter_context(open(kept, "w", encoding=before.encoding, errors="replace", closefd=False))
        sys.stdout = sys.stderr
        try:
            yield results
        finally:
            with contextlib.suppress(BrokenPipeError):  # Who read the results has seen enough.
                results.flush()
            if restore:
                sys.stdout = before
                if kept is not None:
                    os.dup2(kept, 1)
                    os.close(kept)


def _take_over() -> int | None:
    """Let descriptor 1 be what 2 is; return a copy of what it was, None where one of the two is closed."""
    try:
        kept = os.dup(1)
        os.dup2(2, 1)
    except OSError:
        return None
    return kept


def _descriptor(stream: TextIO) -> int:
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError, io.UnsupportedOperation):
        return -1
