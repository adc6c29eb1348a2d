"""The two planners of Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174).

Both cut only at articulation points and keep nothing inside a segment. They are the baselines under the same judge.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from tf_memsaver.ir.segments import Segment, SegmentMode, tidied
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.registry import register_planner
from tf_memsaver.search.one_level import borders

GREEDY_TRIALS = 24
"""Values of the budget parameter b that the search of ``chen_greedy`` tries."""


@register_planner("chen_sqrt", keeps_budget=False)
def chen_sqrt(problem: Problem) -> tuple[Segment, ...]:
    """Cut the articulation points into about √n runs of equal count (section 4.3)."""
    return unless_plain_is_smaller(problem, [covered(problem, sqrt_cuts(problem))])


def sqrt_cuts(problem: Problem) -> list[int]:
    """Return every √n-th of n articulation points."""
    points = [cut.position for cut in problem.articulation_points]
    run = max(1, round(math.sqrt(len(points) + 1)))
    return points[run - 1 :: run]


@register_planner("chen_greedy", keeps_budget=False)
def chen_greedy(problem: Problem) -> tuple[Segment, ...]:
    """Cut where the bytes made since the last cut pass b (algorithm 3), for the b whose plan simulates smallest.

    The paper searches b around √(x·y); here the trials are spread evenly, on a logarithmic scale, between the largest
    single unit and everything, and the simulator judges each.
    """
    made = made_by_unit(problem)
    least, most = max(max(made, default=0), 1), max(sum(made), 1)
    bounds = [least * (most / least) ** (trial / (GREEDY_TRIALS - 1)) for trial in range(GREEDY_TRIALS)]
    cuts = dict.fromkeys(tuple(greedy_cuts(problem, made, bound)) for bound in bounds)
    return unless_plain_is_smaller(problem, [covered(problem, chosen) for chosen in cuts])


def unless_plain_is_smaller(problem: Problem, proposals: Sequence[tuple[Segment, ...]]) -> tuple[Segment, ...]:
    """Return the proposal of least simulated peak, or one store segment where hints allow it and that needs less."""
    if not any(problem.forced):
        proposals = [*proposals, problem.store_all]
    measured = [problem.simulator.measure(segments) for segments in proposals]
    best = min(range(len(proposals)), key=lambda k: (measured[k].peak_bytes, measured[k].replay_seconds))
    return proposals[best]


def made_by_unit(problem: Problem) -> list[int]:
    """Return the bytes that each unit makes in the forward pass."""
    prepared = problem.simulator.prepared
    return [sum(prepared.nbytes[value] for op in ops for value in op.outputs) for ops in prepared.unit_forward]


def greedy_cuts(problem: Problem, made: Sequence[int], bound: float) -> list[int]:
    """Return the articulation points at which the bytes made since the last of them pass ``bound``."""
    until = [0, *itertools.accumulate(made)]
    cuts, start = [], 0
    for cut in problem.articulation_points:
        if until[cut.position] - until[start] > bound:
            cuts.append(cut.position)
            start = cut.position
    return cuts


def covered(problem: Problem, cuts: Sequence[int]) -> tuple[Segment, ...]:
    """Return recompute segments between the cuts, with the pinned units in store segments of their own.

    The last run is stored, as in the paper: its backward pass starts at once, so that dropping it saves nothing.
    """
    units = len(problem.graph.units)
    positions = sorted({0, *cuts, *borders(problem), units})
    last = max(cuts, default=0)
    segments = []
    for start, stop in itertools.pairwise(positions):
        last_run = start >= last and not any(problem.forced[start:stop])
        store = last_run or any(problem.pinned[start:stop])
        mode = SegmentMode.STORE if store else SegmentMode.RECOMPUTE
        segments.append(Segment(start=start, stop=stop, mode=mode))
    return tidied(segments)
