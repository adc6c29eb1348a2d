"""Of plans that need about the least bytes, the one whose peak the allocator reports as least.

The exact searches count the bytes of live tensors. What the device's allocator reports lies above that by holes between
buffers, which no table tells and which differ by several per cent between plans of nearly the same bytes. So: propose
plans at and a little above the least peak, each of least time and of least kept bytes, and those of Chen et al.; take
the one that reports least. A local search on top would follow the model of the allocator into accidents of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from tf_memsaver.plan.chen import chen_greedy, chen_sqrt
from tf_memsaver.plan.one_level import OneLevel, tidied
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.search import INFINITE
from tf_memsaver.plan.types import Segment

LADDER = (1.0, 1.02, 1.06, 1.12, 1.2)
"""Limits to propose plans at, as multiples of the least transient bytes."""

EVEN = 0.01
"""Share of the peak by which a plan that cuts equal blocks alike, and so is traced quicker, may be above the least.

Not where the least peak is wanted at any price.
"""

Segments = tuple[Segment, ...]


def least_reported(problem: Problem, seconds: float = INFINITE) -> Segments:
    """Return the plan of least reported peak that was found, whose replays take at most ``seconds``.

    Never above the plan of least simulated peak, the plain step, or Chen et al.'s, where these keep to ``seconds`` and
    to the hints.

    Raises:
      ValueError: the hints force more recomputation than that.
    """
    judge = _Judge(problem, seconds)
    judge.consider(tidied(problem.one_level.within(seconds).segments))
    if not any(problem.forced):
        judge.consider(problem.store_all)
    judge.consider(chen_sqrt(problem))
    judge.consider(chen_greedy(problem))
    for segments in _ladder(problem.one_level, seconds):
        judge.consider(segments)
    return _even(problem, judge.best, seconds)


class _Judge:
    """Keeps the best plan so far: least reported peak, then least time."""

    def __init__(self, problem: Problem, seconds: float) -> None:
        self._problem, self._seconds = problem, seconds
        self._seen: set[Segments] = set()
        self._rank: tuple[float, float] = (INFINITE, INFINITE)
        self.best: Segments = ()

    def consider(self, segments: Segments) -> None:
        """Take a plan in the place of the best if it is better."""
        if segments in self._seen:
            return
        self._seen.add(segments)
        simulator = self._problem.simulator
        peak = simulator.packed_peak(segments)
        if peak > self._rank[0]:
            return
        rank = peak, simulator.measure(segments).replay_seconds
        if (rank[1] > self._seconds and self.best) or rank >= self._rank:
            return
        self._rank, self.best = rank, segments


def _even(problem: Problem, best: Segments, seconds: float) -> Segments:
    """Return a plan that cuts equal blocks alike, if it reports about the peak of the best one or less."""
    even = problem.one_level.evened(best, seconds)
    if even is None:
        return best
    reported = problem.simulator.reported_peak
    most = reported(best) * (1.0 if seconds == INFINITE else 1 + EVEN)
    return even.segments if reported(even.segments) <= most else best


def _ladder(plans: OneLevel, seconds: float) -> Iterator[Segments]:
    """Yield plans near the least peak, of least time and of least kept bytes."""
    for factor in LADDER:
        for found in plans.near(factor, seconds):
            yield tidied(found)
