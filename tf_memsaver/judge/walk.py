"""Walk over the steps of a schedule: the bytes that are live in each, and from when to when each buffer is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from tf_memsaver.judge.rows import Ints, ScheduledOp, StepArrays

Number = TypeVar("Number", np.int64, np.float64)


class Places(NamedTuple):
    """Places in memory: the buffer that is there first, the first and last step in which it is taken.

    ``of`` is, for each buffer, the number of its place, -1 if it has none.
    """

    buffers: Ints
    first: Ints
    last: Ints
    of: Ints


class Lives:
    """From when to when each buffer of a schedule is live.

    Buffers are allocated at the step that makes them and freed after the last that touches them; those in ``outlive``
    never. An output takes over the buffer of the same size of an input that dies there, where the op may overwrite it.
    """

    def __init__(self, rows: StepArrays, sizes: Ints, outlive: Iterable[int]) -> None:
        self._steps = len(rows.workspace)
        self.last = np.full(len(sizes), -1)
        """The last step that touches each buffer: one after all steps for those that outlive them."""
        self.last[rows.touches.numbers] = rows.touches.places  # Of several places for one buffer, the last one stays.
        self.last[list(outlive)] = self._steps
        self._made, self._made_at = rows.allocates.numbers, rows.allocates.places
        stops = self.last + 1
        self._old, self._new = _taken_over(rows, sizes, self.last)
        stops[self._old] -= 1
        self._stops = stops[self._made]

    def sums(self, amounts: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """Return, for each step, the sum of an amount of each buffer over those that are live."""
        change = np.zeros(self._steps + 2, dtype=amounts.dtype)
        np.add.at(change, self._made_at, amounts[self._made])
        np.subtract.at(change, self._stops, amounts[self._made])
        return np.cumsum(change)[: self._steps]

    def places(self) -> Places:
        """Return what takes a place in memory: a buffer that takes over another one stays in its place."""
        first_of = np.arange(len(self.last))
        for old, new in zip(self._old.tolist(), self._new.tolist(), strict=True):
            first_of[new] = first_of[old]
        ends = np.zeros(len(self.last), dtype=np.int64)
        np.maximum.at(ends, first_of[self._made], np.minimum(self._stops, self._steps) - 1)
        are_first = first_of[self._made] == self._made
        buffers = self._made[are_first]
        numbers = np.full(len(self.last), -1)
        numbers[buffers] = np.arange(len(buffers))
        return Places(buffers, self._made_at[are_first], ends[buffers], numbers[first_of])


def walk(
    steps: Sequence[ScheduledOp], nbytes: Sequence[int], outlive: Iterable[int], resident_bytes: int
) -> tuple[list[int], list[int]]:
    """Return the bytes live while each step runs, and the last step that touches each buffer (see ``Lives``)."""
    rows, sizes = StepArrays.of(steps), np.array(nbytes, dtype=np.int64)
    lives = Lives(rows, sizes, outlive)
    return (resident_bytes + lives.sums(sizes) + rows.workspace).tolist(), lives.last.tolist()


def _taken_over(rows: StepArrays, sizes: Ints, last: Ints) -> tuple[Ints, Ints]:
    """Return the buffers that a new one of the same size takes over, and the new ones, in order of their steps."""
    made_at = np.full(len(sizes), len(rows.workspace))
    made_at[rows.allocates.numbers] = rows.allocates.places
    old, places = rows.overwrites.numbers, rows.overwrites.places
    dying = (last[old] == places) & (made_at[old] < places)
    old, places = old[dying], places[dying]
    starts, counts = np.cumsum(rows.allocates.counts) - rows.allocates.counts, rows.allocates.counts
    # Nearly all steps make one buffer: the first of the same size is what it takes over.
    single = counts[places] == 1
    of_single, at_single = old[single], places[single]
    new_single = rows.allocates.numbers[starts[at_single]]
    equal = sizes[of_single] == sizes[new_single]
    _, first = np.unique(at_single[equal], return_index=True)
    pairs = list(zip(new_single[equal][first].tolist(), of_single[equal][first].tolist(), strict=True))
    for place in dict.fromkeys(places[counts[places] > 1].tolist()):
        made = rows.allocates.numbers[starts[place] : starts[place] + counts[place]].tolist()
        pairs += taken_over(made, old[places == place].tolist(), sizes).items()
    new, old = np.array(sorted(pairs, key=lambda pair: made_at[pair[0]]), dtype=np.int64).reshape(-1, 2).T
    return old, new


def lifetimes(
    steps: Sequence[ScheduledOp], nbytes: Sequence[int], outlive: Iterable[int]
) -> dict[int, tuple[int, int]]:
    """Return, for each buffer that steps allocate, the first and the last step during which ``walk`` counts it.

    A buffer that is taken over ends a step before the one that takes it over.
    """
    _, last = walk(steps, nbytes, outlive, 0)
    lives: dict[int, tuple[int, int]] = {}
    for place, step in enumerate(steps):
        ending = [buffer for buffer in step.overwrites if last[buffer] == place and buffer in lives]
        for old in taken_over(step.allocates, ending, nbytes).values():
            lives[old] = lives[old][0], place - 1
        for buffer in step.allocates:
            lives[buffer] = place, min(last[buffer], len(steps) - 1)
    return lives


def taken_over(made: Sequence[int], dying: list[int], sizes: Sequence[int] | Ints) -> dict[int, int]:
    """Return which new buffers take over a dying one, of the same size."""
    found: dict[int, int] = {}
    for buffer in made:
        for old in dying:
            if sizes[old] == sizes[buffer]:
                found[buffer] = old
                dying.remove(old)
                break
    return found
