"""Walk over the steps of a schedule: the bytes that are live in each, and from when to when each buffer is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tf_memsaver.judge.prepared import ScheduledOp


def walk(
    steps: Sequence[ScheduledOp],
    nbytes: Sequence[int],
    outlive: Iterable[int],
    resident_bytes: int,
) -> tuple[list[int], list[int]]:
    """Return the bytes live while each step runs, and the last step that touches each buffer.

    Buffers are allocated at the step that makes them and freed after the last that touches them; those in ``outlive``
    never. An output takes over the buffer of the same size of an input that dies there, where the op may overwrite it.
    """
    last = last_touches(steps, nbytes, outlive)
    now = resident_bytes
    alive = [False] * len(nbytes)
    live: list[int] = []
    for place, (_, _, touches, made, overwrites, workspace) in enumerate(steps):
        ending = [b for b in overwrites if last[b] == place and alive[b]] if overwrites else []
        successors = taken_over(made, ending, nbytes) if ending else {}
        for buffer in made:
            alive[buffer] = True
            if buffer in successors:
                alive[successors[buffer]] = False
            else:
                now += nbytes[buffer]
        live.append(now + workspace)
        for buffer in touches:
            if last[buffer] == place and alive[buffer]:
                alive[buffer] = False
                now -= nbytes[buffer]
    return live, last


def lifetimes(
    steps: Sequence[ScheduledOp], nbytes: Sequence[int], outlive: Iterable[int]
) -> dict[int, tuple[int, int]]:
    """Return, for each buffer that steps allocate, the first and the last step during which ``walk`` counts it.

    A buffer that is taken over ends a step before the one that takes it over.
    """
    last = last_touches(steps, nbytes, outlive)
    lives: dict[int, tuple[int, int]] = {}
    for place, step in enumerate(steps):
        ending = [buffer for buffer in step.overwrites if last[buffer] == place and buffer in lives]
        for old in taken_over(step.allocates, ending, nbytes).values():
            lives[old] = lives[old][0], place - 1
        for buffer in step.allocates:
            lives[buffer] = place, min(last[buffer], len(steps) - 1)
    return lives


def last_touches(steps: Sequence[ScheduledOp], nbytes: Sequence[int], outlive: Iterable[int]) -> list[int]:
    """Return the last step that touches each buffer: one after all steps for those that outlive them."""
    last = [-1] * len(nbytes)
    for place, step in enumerate(steps):
        for buffer in step.touches:
            last[buffer] = place
    for buffer in outlive:
        last[buffer] = len(steps)
    return last


def taken_over(made: Sequence[int], dying: list[int], nbytes: Sequence[int]) -> dict[int, int]:
    """Return which new buffers take over a dying one, of the same size."""
    found: dict[int, int] = {}
    for buffer in made:
        for old in dying:
            if nbytes[old] == nbytes[buffer]:
                found[buffer] = old
                dying.remove(old)
                break
    return found
