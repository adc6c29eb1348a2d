"""Steps of a schedule, one by one and as arrays, so that what walks over them needs no loop."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class ScheduledOp(NamedTuple):
    """A scheduled op over buffers. ``op`` is its index, or -1 for an order gate (a copy of one buffer).

    ``touches`` are the buffers read or written that are not resident, ``allocates`` those that are new, ``overwrites``
    those that the first new one of the same size may take over. ``copies`` are new only if others have yet to touch
    them.
    """

    op: int
    replay: bool
    touches: tuple[int, ...]
    allocates: tuple[int, ...]
    overwrites: tuple[int, ...]
    workspace: int
    copies: tuple[int, ...] = ()


class Lists(NamedTuple):
    """A list of numbers for each step: how many each has, and all of them, one list behind the other."""

    counts: Ints
    numbers: Ints

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]]) -> Lists:
        """Return these lists."""
        counts = np.fromiter(map(len, lists), np.int64, len(lists))
        return cls(counts, np.fromiter(itertools.chain.from_iterable(lists), np.int64))

    @classmethod
    def joined(cls, parts: Sequence[Lists]) -> Lists:
        """Return the lists of several parts, one behind the other."""
        return cls(*map(np.concatenate, zip(*parts, strict=True)))

    def take(self, places: Ints) -> Lists:
        """Return the lists of some steps."""
        counts = self.counts[places]
        starts = (np.cumsum(self.counts) - self.counts)[places]
        shifts = np.repeat(starts - (np.cumsum(counts) - counts), counts)
        return Lists(counts, self.numbers[shifts + np.arange(len(shifts))])

    @property
    def places(self) -> Ints:
        """The step that each number belongs to."""
        return np.repeat(np.arange(len(self.counts)), self.counts)


class StepArrays(NamedTuple):
    """The fields of ``ScheduledOp`` over buffers, for many steps."""

    touches: Lists
    allocates: Lists
    overwrites: Lists
    workspace: Ints

    @classmethod
    def of(cls, steps: Sequence[ScheduledOp]) -> StepArrays:
        """Return the rows of some steps."""
        return cls(
            touches=Lists.of([step.touches for step in steps]),
            allocates=Lists.of([step.allocates for step in steps]),
            overwrites=Lists.of([step.overwrites for step in steps]),
            workspace=np.array([step.workspace for step in steps], dtype=np.int64),
        )

    @classmethod
    def joined(cls, parts: Sequence[StepArrays]) -> StepArrays:
        """Return the rows of several parts, one behind the other."""
        touches, allocates, overwrites, workspace = zip(*(cls.of([]), *parts), strict=True)
        return cls(
            touches=Lists.joined(touches),
            allocates=Lists.joined(allocates),
            overwrites=Lists.joined(overwrites),
            workspace=np.concatenate(workspace),
        )

    def take(self, places: Ints) -> StepArrays:
        """Return the rows of some steps."""
        touches, allocates, overwrites = (lists.take(places) for lists in self[:3])
        return StepArrays(touches, allocates, overwrites, self.workspace[places])

    def moved(self, first: int, by: int) -> StepArrays:
        """Return the rows with the buffers from number ``first`` on counted up."""

        def shifted(lists: Lists) -> Lists:
            return Lists(lists.counts, lists.numbers + by * (lists.numbers >= first))

        touches, allocates, overwrites = map(shifted, self[:3])
        return StepArrays(touches, allocates, overwrites, self.workspace)
