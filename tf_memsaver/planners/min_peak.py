"""``min_peak``: the least peak at any price."""

from __future__ import annotations

from collections.abc import Sequence

from tf_memsaver.ir.segments import Segment
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.registry import register_planner
from tf_memsaver.planners.reported import least_reported


@register_planner("min_peak", keeps_budget=False)
def min_peak(problem: Problem) -> Sequence[Segment]:
    """Return the cover of one level of least peak: of least live bytes where the allocator reports just those.

    Else the one that reports least among those near it (see ``reported``).
    """
    return least_reported(problem)
