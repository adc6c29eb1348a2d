"""Long loops say how far they are, and are not held up.

Whoever listens shows how far they are; where nobody does, nothing happens.
"""

from __future__ import annotations

import contextlib
import contextvars
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")

Listener = Callable[[str, int, int], None]
"""Is told what is being done, how many parts of it are done, and how many there are."""

_LISTENER: contextvars.ContextVar[Listener | None] = contextvars.ContextVar("listener", default=None)


@contextlib.contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """Tell ``listener`` of all loops in the block, in this thread."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def report_progress(what: str, done: int, total: int) -> None:
    """Say that ``done`` of ``total`` parts of something are done; nothing where the total is not known (0)."""
    listener = _LISTENER.get()
    if listener is not None and total:
        listener(what, done, total)


def counted(what: str, items: Sequence[Item]) -> Iterator[Item]:
    """Yield the items, and say after each how many are done; ``what`` says what is done with them."""
    for done, item in enumerate(items):
        report_progress(what, done, len(items))
        yield item
    report_progress(what, len(items), len(items))


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Keep Python's collector of cycles from running in the block.

    It runs each time that some hundred objects have been made, and now and then goes through all there are. Where most
    of them stay, as in planning, that takes a fifth of the time and frees nothing.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
