"""Blocks that a graph repeats, and plans that cut each of them alike.

Searches that narrow what they look at cut equal blocks here and there. A plan with one block's segments in all of them
is often the better one, and its segments are twins that are traced once (see ``runtime.twins``).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tf_memsaver.ir.segments import Segment, SegmentMode
from tf_memsaver.judge.rows import Ints
from tf_memsaver.plan.problem import Problem

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
    """Units ``start`` to ``stop``, each of which is like the one ``period`` after it, if that lies among them."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """A cover that has one tile, the segments of a few blocks, as often as it fits into a repeat, and else those given.

    The tile stands ``count`` times, ``size`` units apart, from ``begin`` on.
    """

    given: Sequence[Segment]
    given_until: Ints
    tile: tuple[Segment, ...]
    begin: int
    size: int
    count: int

    @property
    def end(self) -> int:
        """The position after the last tile."""
        return self.begin + self.count * self.size

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The cover."""
        middle = [_moved(segment, by) for by in self._offsets.tolist() for segment in self.tile]
        after = _between(self.given, self.end, self.given[-1].stop)
        return (*_between(self.given, 0, self.begin), *middle, *after)

    @property
    def stops(self) -> Ints:
        """Where the segments of the tiles stop, and the one before them."""
        stops = np.array([self.tile[0].start, *(segment.stop for segment in self.tile)])
        return (stops + self._offsets[:, None]).ravel()

    @property
    def replayed_until(self) -> Ints:
        """For each unit, where the recompute segment that it lies in stops; 0 in store segments."""
        tile = replayed_until(self.tile)
        middle = np.where(tile, tile + self._offsets[:, None], 0).ravel()
        before = np.minimum(self.given_until[: self.begin], self.begin)
        return np.concatenate([before, middle, self.given_until[self.end :]])

    @property
    def _offsets(self) -> Ints:
        return np.arange(0, self.count * self.size, self.size)


def replayed_until(segments: Sequence[Segment]) -> Ints:
    """Return, for each unit of segments of one level, where its recompute segment stops; 0 in store segments."""
    stops = [segment.stop if segment.mode is SegmentMode.RECOMPUTE else 0 for segment in segments]
    return np.repeat(stops, [segment.stop - segment.start for segment in segments])


def tilings(segments: Sequence[Segment], repeat: Repeat, positions: Collection[int]) -> Iterator[Tiling]:
    """Yield the covers that have the segments of a few blocks in all blocks of a repeat, and else those given.

    ``positions`` are those at which segments may end. Blocks that are cut alike make one cover.
    """
    allowed = np.zeros(segments[-1].stop + 1, dtype=np.bool_)
    allowed[list(positions)] = True
    until = replayed_until(segments)
    seen: set[tuple[tuple[int, int, SegmentMode], ...]] = set()
    for count in TILES:
        size = count * repeat.period
        for first in segments:
            start = first.start
            if start < repeat.start or start + size > repeat.stop:
                continue
            begin = start - (start - repeat.start) // size * size
            tile = tuple(_moved(segment, begin - start) for segment in _between(segments, start, start + size))
            # Tiles of another size or place differ in the first start or the last stop.
            key = tuple((segment.start, segment.stop, segment.mode) for segment in tile)
            if key in seen:
                continue
            seen.add(key)
            fits = (repeat.stop - begin) // size
            tiling = Tiling(given=segments, given_until=until, tile=tile, begin=begin, size=size, count=fits)
            if allowed[tiling.stops].all():
                yield tiling


def _between(segments: Sequence[Segment], start: int, stop: int) -> list[Segment]:
    """Return the segments of a cover that lie in ``[start, stop)``, clipped to it."""
    first = bisect_right(segments, start, key=lambda segment: segment.stop)
    end = bisect_left(segments, stop, key=lambda segment: segment.start)
    return [
        segment
        if start <= segment.start and segment.stop <= stop
        else Segment(start=max(segment.start, start), stop=min(segment.stop, stop), mode=segment.mode)
        for segment in segments[first:end]
    ]


def _moved(segment: Segment, by: int) -> Segment:
    return Segment(start=segment.start + by, stop=segment.stop + by, mode=segment.mode) if by else segment


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
