"""Local search over segments within segments, under the simulator: split, join, move, store or replay, nest.

The recurrence of ``nested`` adds up tables that count the same bytes more than once, so what it proposes can often be
made better by small steps. Steps are drawn from a generator that begins the same way every time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from tf_memsaver.ir.segments import Segment, SegmentMode, tidied
from tf_memsaver.plan.problem import Problem
from tf_memsaver.search.one_level import Found, candidate_positions
from tf_memsaver.search.tables import MODES

Segments = tuple[Segment, ...]
Rank = Callable[[Found], tuple[float, ...]]

RESTART = 2000
"""Steps after which the search goes on from the best plan found."""

WORSE = 0.01
"""How often a step to a plan that ranks higher is taken."""


def polished(problem: Problem, start: Found, rank: Rank, steps: int, seed: int = 0) -> Found:
    """Return the plan of least rank that was found in so many steps from a given one; the same one every time.

    Each step is simulated, so that time grows with ``steps`` and with the number of ops. Hints are kept.
    """
    generator = random.Random(seed)
    positions = candidate_positions(problem)
    best, best_rank = start, rank(start)
    current, current_rank = best, best_rank
    for step in range(1, steps + 1):
        segments = current.segments
        for _ in range(generator.choice((1, 1, 2, 3))):
            segments = _changed(segments, positions, generator)
        if problem.misplaced(segments) is not None:
            continue
        changed = Found(segments=segments, measured=problem.simulator.measure(segments))
        changed_rank = rank(changed)
        if changed_rank <= current_rank or generator.random() < WORSE:
            current, current_rank = changed, changed_rank
        if changed_rank < best_rank:
            best, best_rank = changed, changed_rank
        if step % RESTART == 0:
            current, current_rank = best, best_rank
    return best


def _changed(segments: Sequence[Segment], positions: Sequence[int], generator: random.Random) -> Segments:
    """Return the segments with one of them split, joined with the next, moved, stored or replayed, or nested."""
    place = generator.randrange(len(segments))
    one, rest = segments[place], segments[place + 1 :]
    if one.children and generator.random() < 0.5:
        inner = _changed(one.children, positions, generator)
        new = [_segment(one.start, one.stop, one.mode, inner)]
    else:
        move = generator.choice((_split, _joined, _moved, _other_mode, _nested))
        new, taken = move(one, rest[:1], positions, generator)
        rest = rest[taken:]
    return tidied([*segments[:place], *new, *rest])


Moved = tuple[list[Segment], int]
"""What stands in the place of a segment, and how many of those after it that takes in."""


def _split(one: Segment, _: Sequence[Segment], positions: Sequence[int], generator: random.Random) -> Moved:
    inside = _inside(positions, one.start, one.stop)
    if not inside:
        return [one], 0
    cut = generator.choice(inside)
    spans = (one.start, cut), (cut, one.stop)
    return [_segment(start, stop, generator.choice(MODES)) for start, stop in spans], 0


def _joined(one: Segment, following: Sequence[Segment], _: Sequence[int], generator: random.Random) -> Moved:
    if not following:
        return [one], 0
    mode = generator.choice((one.mode, following[0].mode))
    return [_segment(one.start, following[0].stop, mode)], 1


def _moved(one: Segment, following: Sequence[Segment], positions: Sequence[int], generator: random.Random) -> Moved:
    if not following:
        return [one], 0
    cut = generator.choice(_inside(positions, one.start, following[0].stop))
    return [_segment(one.start, cut, one.mode), _segment(cut, following[0].stop, following[0].mode)], 1


def _other_mode(one: Segment, _: Sequence[Segment], __: Sequence[int], ___: random.Random) -> Moved:
    other = SegmentMode.STORE if one.mode is SegmentMode.RECOMPUTE else SegmentMode.RECOMPUTE
    return [_segment(one.start, one.stop, other)], 0


def _nested(one: Segment, _: Sequence[Segment], positions: Sequence[int], generator: random.Random) -> Moved:
    if one.mode is SegmentMode.STORE:
        return [one], 0
    if one.children:
        return [_segment(one.start, one.stop, one.mode)], 0
    halves = _split(one, (), positions, generator)[0]
    return [_segment(one.start, one.stop, one.mode, tuple(halves) if len(halves) > 1 else ())], 0


def _inside(positions: Sequence[int], start: int, stop: int) -> list[int]:
    return [position for position in positions if start < position < stop]


def _segment(start: int, stop: int, mode: SegmentMode, children: Segments = ()) -> Segment:
    return Segment(start=start, stop=stop, mode=mode, children=children)
