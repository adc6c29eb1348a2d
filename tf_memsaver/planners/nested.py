"""``nested``: segments within segments."""

from __future__ import annotations

from collections.abc import Sequence

from tf_memsaver.ir.segments import Segment, tidied
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.registry import register_planner
from tf_memsaver.search.nested import quickest_nested


@register_planner("nested")
def nested(problem: Problem) -> Sequence[Segment]:
    """Return the cover of several levels of least simulated peak that was found, at any price in time.

    With a budget, the quickest that was found within it. One level is enough where that is as good.
    """
    budget = problem.request.budget_bytes
    return tidied(quickest_nested(problem, 0 if budget is None else budget).segments)
