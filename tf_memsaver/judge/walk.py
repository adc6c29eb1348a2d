"""Walk over the steps of a schedule and count the bytes that are live in each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from tf_memsaver.judge.prepared import Step


class Ledger(Protocol):
    """Is told of every allocation in order."""

    def allocate(self, buffer: int) -> None:
        """A buffer is made."""

    def take_over(self, buffer: int, old: int) -> None:
        """A buffer takes the place of one that dies."""

    def use_workspace(self, nbytes: int) -> None:
        """All outputs of a step stand; while it runs it needs this many bytes more."""

    def free(self, buffer: int) -> None:
        """A buffer dies."""


def walk(
    steps: Sequence[Step],
    nbytes: Sequence[int],
    outlive: Iterable[int],
    resident_bytes: int,
    ledger: Ledger | None = None,
) -> tuple[list[int], list[int]]:
    """Return the bytes live while each step runs, and the last step that touches each buffer.

    Buffers are allocated at the step that makes them and freed after the last that touches them; those in ``outlive``
    never. An output takes over the buffer of the same size of an input that dies there, where the op may overwrite it.
    """
    last = _last_touches(steps, nbytes, outlive)
    now = resident_bytes
    alive = [False] * len(nbytes)
    live: list[int] = []
    for place, (_, _, touches, made, overwrites, workspace) in enumerate(steps):
        ending = [b for b in overwrites if last[b] == place and alive[b]] if overwrites else []
        taken_over = _taken_over(made, ending, nbytes) if ending else {}
        for buffer in made:
            alive[buffer] = True
            if buffer in taken_over:
                alive[taken_over[buffer]] = False
            else:
                now += nbytes[buffer]
        live.append(now + workspace)
        dying: list[int] = []
        for buffer in touches:
            if last[buffer] == place and alive[buffer]:
                alive[buffer] = False
                now -= nbytes[buffer]
                dying.append(buffer)
        if ledger is not None:
            _book(ledger, made, taken_over, workspace, dying)
    return live, last


def _book(
    ledger: Ledger, made: Sequence[int], taken_over: Mapping[int, int], workspace: int, dying: Sequence[int]
) -> None:
    """Tell a ledger what happens in a step."""
    for buffer in made:
        if buffer in taken_over:
            ledger.take_over(buffer, taken_over[buffer])
        else:
            ledger.allocate(buffer)
    ledger.use_workspace(workspace)
    for buffer in dying:
        ledger.free(buffer)


def _last_touches(steps: Sequence[Step], nbytes: Sequence[int], outlive: Iterable[int]) -> list[int]:
    """Return the last step that touches each buffer: one behind all steps for those that outlive them."""
    last = [-1] * len(nbytes)
    for place, step in enumerate(steps):
        for buffer in step.touches:
            last[buffer] = place
    for buffer in outlive:
        last[buffer] = len(steps)
    return last


def _taken_over(made: Sequence[int], dying: list[int], nbytes: Sequence[int]) -> dict[int, int]:
    """Return which new buffers take over a dying one, of the same size."""
    taken_over: dict[int, int] = {}
    for buffer in made:
        for old in dying:
            if nbytes[old] == nbytes[buffer]:
                taken_over[buffer] = old
                dying.remove(old)
                break
    return taken_over
