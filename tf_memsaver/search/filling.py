"""Store again, one after the other, what a plan of least memory recomputes, judged in the order in which it runs.

The exact searches count the bytes of live tensors in the order of capture. Where those say little of what the allocator
takes in a plan's own order, these plans are quicker than theirs for the same peak.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tf_memsaver.ir.segments import Segment, SegmentMode, tidied
from tf_memsaver.plan.problem import Problem

MOST_STORED = 24
"""Segments that are stored again, those first whose operations take longest."""

Segments = tuple[Segment, ...]


def filled(problem: Problem, segments: Sequence[Segment]) -> list[Segments]:
    """Return plans that each store one segment more than the one before, the first of them ``segments`` themselves.

    What is stored first saves most seconds for each byte by which the highest peak rises if it is stored alone.
    """
    highest, measure = problem.simulator.highest_peak, problem.simulator.measure
    first = tidied(segments)

    def gain(segment: Segment) -> float:
        stored = _storing(first, segment)
        if problem.misplaced(stored) is not None:
            return 0.0
        seconds = measure(first).replay_seconds - measure(stored).replay_seconds
        return seconds / max(1, highest(stored) - highest(first))

    recomputed = [segment for segment in first if segment.mode is SegmentMode.RECOMPUTE]
    recomputed.sort(key=lambda segment: -_forward_seconds(problem, segment))
    gains = {segment: gain(segment) for segment in recomputed[:MOST_STORED]}
    plans = [first]
    for segment in sorted(gains, key=lambda each: -gains[each]):
        stored = _storing(plans[-1], segment)
        if problem.misplaced(stored) is None:
            plans.append(stored)
    return plans


def _storing(segments: Segments, segment: Segment) -> Segments:
    stored = dataclasses.replace(segment, mode=SegmentMode.STORE, children=())
    return tidied([stored if each == segment else each for each in segments])


def _forward_seconds(problem: Problem, segment: Segment) -> float:
    forward = problem.simulator.prepared.unit_forward
    return sum(op.seconds for unit in range(segment.start, segment.stop) for op in forward[unit])
