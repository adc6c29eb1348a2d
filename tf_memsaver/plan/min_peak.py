"""``min_peak``: the least peak at any price."""

from __future__ import annotations

from collections.abc import Sequence

from tf_memsaver.plan.one_level import tidied
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.registry import register_planner
from tf_memsaver.plan.types import Segment


@register_planner("min_peak")
def min_peak(problem: Problem) -> Sequence[Segment]:
    """Return the cover of one level of least simulated peak, and of those the quickest that was found."""
    return tidied(problem.one_level.smallest.segments)
