"""The Pareto front of peak against step time, over the same tables."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from tf_memsaver.ir.segments import tidied
from tf_memsaver.pace import report_progress
from tf_memsaver.plan.plan import Plan
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.registry import Choice
from tf_memsaver.planners.min_time import choice_of
from tf_memsaver.search.nested import several_levels
from tf_memsaver.search.one_level import OneLevel

Item = TypeVar("Item")

BELOW = 0.25
"""Share of points below the least peak of one level."""


def proposals(problem: Problem, points: int) -> Iterator[Choice]:
    """Yield plans for limits between the least peak and the plain step's: first evenly spaced, then in the widest gaps.

    About ``points`` different ones, or as many as are found with twice as many searches; and ``BELOW`` times as many of
    several levels, below the least peak of one level.
    """
    plans = problem.once(OneLevel)
    smallest = plans.smallest
    yield choice_of(smallest)
    yield from _several_levels(problem, max(2, int(BELOW * points)))
    largest = plans.quickest(2**62)
    if largest is None or largest.peak_bytes <= smallest.peak_bytes:
        return
    yield choice_of(largest)
    found = {smallest.peak_bytes, largest.peak_bytes}
    limits = [
        smallest.peak_bytes + (largest.peak_bytes - smallest.peak_bytes) * place // (points - 1)
        for place in range(1, points - 1)
    ]
    for _ in range(2 * points):
        report_progress("plans", min(len(found), points), points)
        if len(found) >= points and not limits:
            return
        limit = limits.pop() if limits else _middle_of_widest_gap(sorted(found))
        between = plans.quickest(limit, smallest.segments)
        if between is None:
            continue
        found.add(between.peak_bytes)
        yield choice_of(between)


def _several_levels(problem: Problem, count: int) -> Iterator[Choice]:
    """Yield at most so many plans of several levels below the least peak of one level, evenly chosen."""
    plans = problem.once(OneLevel)
    below = [found for found in problem.once(several_levels) if found.peak_bytes < plans.smallest.peak_bytes]
    front = _front(below, lambda found: found.rank)
    places = dict.fromkeys(place * (len(front) - 1) // (count - 1) for place in range(count)) if front else ()
    yield from (Choice(planner="nested", segments=tidied(front[place].segments)) for place in places)


def _middle_of_widest_gap(peaks: Sequence[int]) -> int:
    width, lower = max((above - below, below) for below, above in itertools.pairwise(peaks))
    return lower + width // 2


def pareto(plans: Sequence[Plan]) -> list[Plan]:
    """Return the plans that no other one beats in both peak and time, in order of falling peaks."""
    return _front(plans, lambda plan: (plan.peak_bytes, plan.step_overhead))[::-1]


def _front(plans: Sequence[Item], costs: Callable[[Item], tuple[float, ...]]) -> list[Item]:
    """Return the Pareto-optimal plans in order of rising peaks; ``costs`` are peak, time, and what else ranks them."""
    front: list[Item] = []
    for plan in sorted(plans, key=costs):
        if not front or costs(plan)[1] < costs(front[-1])[1]:
            front.append(plan)
    return front
