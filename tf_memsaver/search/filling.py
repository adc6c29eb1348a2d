"""Store again, one after the other, what a plan of least memory recomputes, judged in the order in which it runs.

The exact searches count the bytes of live tensors in the order of capture. Where those say little of what the allocator
takes in a plan's own order, these plans are quicker than theirs for the same peak.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tf_memsaver.ir.segments import Segment, SegmentMode, tidied
from tf_memsaver.plan.problem import Problem

Segments = tuple[Segment, ...]


def filled(problem: Problem, segments: Sequence[Segment]) -> list[Segments]:
    """Return plans that each store one segment more than the one before, the first of them ``segments`` themselves.

    What takes most seconds to recompute for each byte that is kept if it is stored comes first; of equals the last one,
    whose bytes are kept for the shortest time.
    """
    first = tidied(segments)
    recomputed = [segment for segment in first if segment.mode is SegmentMode.RECOMPUTE]
    recomputed.sort(key=lambda segment: (_seconds_a_byte(problem, segment), segment.start), reverse=True)
    plans = [first]
    for segment in recomputed:
        stored = _storing(plans[-1], segment)
        if problem.misplaced(stored) is None:
            plans.append(stored)
    return plans


def _storing(segments: Segments, segment: Segment) -> Segments:
    stored = dataclasses.replace(segment, mode=SegmentMode.STORE, children=())
    return tidied([stored if each == segment else each for each in segments])


def _seconds_a_byte(problem: Problem, segment: Segment) -> float:
    forward, place = problem.simulator.prepared.unit_forward, slice(segment.start, segment.stop)
    seconds = sum(op.seconds for ops in forward[place] for op in ops)
    return seconds / max(1, sum(problem.kept_bytes[place]))
