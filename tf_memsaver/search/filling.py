"""Store what a budget leaves room for: recompute segments of a plan that it can do without, judged in their own order.

The exact searches count the bytes of live tensors in the order of capture. So a plan of theirs may be well below a
budget by what it takes in its own order, with what the allocator adds, and their next larger one above it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tf_memsaver.ir.segments import Segment, SegmentMode, tidied
from tf_memsaver.plan.problem import Problem

MOST_TRIED = 16
"""Segments that are tried, those first whose operations take longest."""


def filled(problem: Problem, segments: Sequence[Segment], budget: int, enough: int) -> tuple[Segment, ...]:
    """Return segments of which some are stored that were recomputed, with the highest peak within a budget.

    Nothing is tried any more where that peak is ``enough`` bytes or more.
    """
    highest = problem.simulator.highest_peak
    best = tidied(segments)
    recomputed = [segment for segment in best if segment.mode is SegmentMode.RECOMPUTE]
    recomputed.sort(key=lambda segment: -_forward_seconds(problem, segment))
    for segment in recomputed[:MOST_TRIED]:
        if highest(best) >= enough:
            break
        stored = dataclasses.replace(segment, mode=SegmentMode.STORE, children=())
        tried = tidied([stored if each == segment else each for each in best])
        if problem.misplaced(tried) is None and highest(tried) <= budget:
            best = tried
    return best


def _forward_seconds(problem: Problem, segment: Segment) -> float:
    forward = problem.simulator.prepared.unit_forward
    return sum(op.seconds for unit in range(segment.start, segment.stop) for op in forward[unit])
