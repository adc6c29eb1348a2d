"""Of plans that need about the least bytes, the one whose peak the allocator reports as least.

The exact searches count the bytes of live tensors. What the device's allocator reports lies above that by holes between
buffers, which no table tells and which differ by several per cent between plans of nearly the same bytes. So: propose
plans at and a little above the least peak, each of least time and of least kept bytes, and those of Chen et al.; take
the one that reports least; then move, merge and flip its segments one at a time while that makes it smaller.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tf_memsaver.plan.chen import chen_sqrt
from tf_memsaver.plan.one_level import INFINITE, OneLevel, candidate_positions, tidied
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.types import Segment, SegmentMode

LADDER = (1.0, 1.01, 1.02, 1.04, 1.06, 1.1, 1.15, 1.2)
"""Limits to propose plans at, as multiples of the least transient bytes."""

POLISH_OPS = 150_000
"""Ops that the polish may simulate: this bounds its time, whatever the size of the graph."""

MOST_TRIALS = 300
"""Plans that the polish may simulate, in graphs so small that the ops do not bound it."""

Segments = tuple[Segment, ...]


def least_reported(problem: Problem, seconds: float = INFINITE) -> Segments:
    """Return the plan of least reported peak that was found, whose replays take at most ``seconds``.

    Never above the plan of least simulated peak, nor above ``chen_sqrt``'s, where these keep to ``seconds``.

    Raises:
      ValueError: the hints force more recomputation than that.
    """
    judge = _Judge(problem, seconds)
    start = tidied(problem.one_level.within(seconds).segments)
    judge.consider(start)
    judge.consider(tuple(chen_sqrt(problem)))
    for segments in _ladder(problem.one_level, seconds):
        judge.consider(segments)
    trials = min(MOST_TRIALS, POLISH_OPS // max(len(problem.graph.ops), 1))
    positions = candidate_positions(problem)
    improved = True
    while improved and trials > 0:
        improved = False
        for segments in _neighbours(judge.best, positions):
            if trials <= 0:
                break
            if _allowed(problem, segments):
                trials -= 1
                if judge.consider(segments):
                    improved = True
                    break
    return judge.best


class _Judge:
    """Keeps the best plan so far: least reported peak, then least time."""

    def __init__(self, problem: Problem, seconds: float) -> None:
        self._problem, self._seconds = problem, seconds
        self._seen: set[Segments] = set()
        self._rank: tuple[float, float] = (INFINITE, INFINITE)
        self.best: Segments = ()

    def consider(self, segments: Segments) -> bool:
        """Take a plan in the place of the best if it is better; return whether it is."""
        if segments in self._seen:
            return False
        self._seen.add(segments)
        simulator = self._problem.simulator
        peak = simulator.reported_peak(segments)
        if peak > self._rank[0]:
            return False
        rank = peak, simulator.measure(segments).replay_seconds
        if (rank[1] > self._seconds and self.best) or rank >= self._rank:
            return False
        self._rank, self.best = rank, segments
        return True


def _ladder(plans: OneLevel, seconds: float) -> Iterator[Segments]:
    """Yield plans near the least peak, of least time and of least kept bytes."""
    for factor in LADDER:
        for found in plans.near(factor, seconds):
            yield tidied(found)


def _neighbours(segments: Segments, positions: Sequence[int]) -> Iterator[Segments]:
    """Yield the covers that differ in one place: a border moved to the next cut, two segments as one, a mode
    flipped."""
    index = {position: place for place, position in enumerate(positions)}
    for k, segment in enumerate(segments):
        others = {SegmentMode.STORE: SegmentMode.RECOMPUTE, SegmentMode.RECOMPUTE: SegmentMode.STORE}
        if k + 1 < len(segments):
            behind = segments[k + 1]
            for place in (index[segment.stop] - 1, index[segment.stop] + 1):
                if segment.start < positions[place] < behind.stop:
                    moved = Segment(start=segment.start, stop=positions[place], mode=segment.mode)
                    rest = Segment(start=positions[place], stop=behind.stop, mode=behind.mode)
                    yield tidied((*segments[:k], moved, rest, *segments[k + 2 :]))
            joined = Segment(start=segment.start, stop=behind.stop, mode=SegmentMode.RECOMPUTE)
            yield tidied((*segments[:k], joined, *segments[k + 2 :]))
        flipped = Segment(start=segment.start, stop=segment.stop, mode=others[segment.mode])
        yield tidied((*segments[:k], flipped, *segments[k + 1 :]))


def _allowed(problem: Problem, segments: Segments) -> bool:
    for segment in segments:
        unwanted = problem.pinned if segment.mode is SegmentMode.RECOMPUTE else problem.forced
        if any(unwanted[segment.start : segment.stop]):
            return False
    return True
