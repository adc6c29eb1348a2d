"""Walk over the steps of a schedule and count the bytes that are live in each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from tf_memsaver.judge.prepared import Step


class Ledger(Protocol):
    """Is told of every allocation in order."""

    def allocate(self, buffer: int) -> None:
        """A buffer is made."""

    def take_over(self, buffer: int, heir_of: int) -> None:
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

    Buffers are allocated at the step that makes them and freed behind the last that touches them; those in ``outlive``
    never. An output takes over the buffer of the same size of an input that dies there, where the op may overwrite it.
    """
    last = [-1] * len(nbytes)
    for place, step in enumerate(steps):
        for buffer in step.touches:
            last[buffer] = place
    for buffer in outlive:
        last[buffer] = len(steps)
    now = resident_bytes
    alive = [False] * len(nbytes)
    live: list[int] = []
    for place, (_, _, touches, news, overwrites, workspace) in enumerate(steps):
        free = [b for b in overwrites if last[b] == place and alive[b]] if overwrites else None
        for buffer in news:
            alive[buffer] = True
            heir = next((b for b in free if nbytes[b] == nbytes[buffer]), None) if free else None
            if heir is None:
                now += nbytes[buffer]
                if ledger is not None:
                    ledger.allocate(buffer)
            else:
                alive[heir] = False
                free = [b for b in free or () if b != heir]
                if ledger is not None:
                    ledger.take_over(buffer, heir)
        live.append(now + workspace)
        if ledger is not None:
            ledger.use_workspace(workspace)
        for buffer in touches:
            if last[buffer] == place and alive[buffer]:
                alive[buffer] = False
                now -= nbytes[buffer]
                if ledger is not None:
                    ledger.free(buffer)
    return live, last
