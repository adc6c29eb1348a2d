"""Blocks that a graph repeats, and plans that cut each of them alike.

Searches that narrow what they look at cut equal blocks here and there. A plan with one block's segments in all of them
is often the better one, and its segments are twins that are traced once (see ``twins``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.types import Segment

LONGEST_PERIOD = 512
"""Units. Longer blocks are not looked for."""

LEAST_BLOCKS = 4
"""Fewer equal blocks in a row are not worth a plan of their own."""

MOST_REPEATS = 4
"""Rows of equal blocks that are looked for in one graph."""

TILES = (1, 2, 3)
"""Blocks of which the segments are taken together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """Units ``start`` to ``stop``, each of which is like the one ``period`` behind it, if that lies among them."""

    start: int
    stop: int
    period: int


def repeats(problem: Problem) -> tuple[Repeat, ...]:
    """Return rows of equal blocks that do not overlap, the longest first.

    Units are alike if they have the same operations with results of the same bytes, and hints treat them the same.
    """
    kinds, free = _kinds(problem), np.ones(len(problem.graph.units), dtype=np.bool_)
    found: list[Repeat] = []
    for _ in range(MOST_REPEATS):
        longest = _longest(np.where(free, kinds, -1 - np.arange(len(kinds))))
        if longest is None:
            break
        found.append(longest)
        free[longest.start : longest.stop] = False
    return tuple(found)


def tilings(segments: Sequence[Segment], repeat: Repeat, positions: Collection[int]) -> Iterator[tuple[Segment, ...]]:
    """Yield the covers that have the segments of a few blocks in all blocks of a repeat, and else those given.

    ``positions`` are those at which segments may end.
    """
    for count in TILES:
        size = count * repeat.period
        for first in segments:
            if first.start < repeat.start or first.start + size > repeat.stop:
                continue
            tiled = _tiled(segments, repeat, first.start, size)
            if all(segment.stop in positions for segment in tiled):
                yield tiled


def _tiled(segments: Sequence[Segment], repeat: Repeat, start: int, size: int) -> tuple[Segment, ...]:
    """Return the segments with those of ``[start, start + size)`` as often as they fit into the repeat."""
    tile = _between(segments, start, start + size)
    begin = start - (start - repeat.start) // size * size
    tiled = _between(segments, 0, begin)
    while begin + size <= repeat.stop:
        tiled += [_moved(segment, begin - start) for segment in tile]
        begin += size
    return (*tiled, *_between(segments, begin, segments[-1].stop))


def _between(segments: Sequence[Segment], start: int, stop: int) -> list[Segment]:
    clipped = ((max(segment.start, start), min(segment.stop, stop), segment.mode) for segment in segments)
    return [Segment(start=first, stop=last, mode=mode) for first, last, mode in clipped if first < last]


def _moved(segment: Segment, by: int) -> Segment:
    return Segment(start=segment.start + by, stop=segment.stop + by, mode=segment.mode)


def _kinds(problem: Problem) -> npt.NDArray[np.int64]:
    """Return a number for each unit: equal ones for units that are alike."""
    graph = problem.graph
    made: list[list[object]] = [[pinned, forced] for pinned, forced in zip(problem.pinned, problem.forced, strict=True)]
    for op in graph.ops:
        if op.unit is not None:
            made[op.unit].append((op.type, op.phase, tuple(graph.values[value].nbytes for value in op.outputs)))
    numbers: dict[tuple[object, ...], int] = {}
    return np.array([numbers.setdefault(tuple(each), len(numbers)) for each in made])


def _longest(kinds: npt.NDArray[np.int64]) -> Repeat | None:
    """Return the longest row of equal blocks; of rows of about one length, that of the smallest blocks."""
    best: Repeat | None = None
    for period in range(1, min(LONGEST_PERIOD, len(kinds) // LEAST_BLOCKS) + 1):
        same = np.concatenate([[False], kinds[:-period] == kinds[period:], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1])
        lengths = edges[1::2] - edges[::2]
        if not len(lengths):
            continue
        longest = int(lengths.argmax())
        start, stop = int(edges[2 * longest]), int(edges[2 * longest + 1]) + period
        if stop - start < LEAST_BLOCKS * period:
            continue
        if best is None or stop - start > best.stop - best.start:
            best = Repeat(start=start, stop=stop, period=period)
    return best
